from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.modules import WithExtra
from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.state.per_rank import PerRank


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


# per rank


def save_per_rank(memory, values):
    return memory.store({rank: capture({"own": PerRank(value)}, rank=rank) for rank, value in enumerate(values)})


def test_every_rank_gets_its_own(memory):
    stored = save_per_rank(memory, [{"rng": torch.full((2,), float(r)), "pos": r} for r in range(3)])
    for rank in range(3):
        inner = {"rng": torch.zeros(2), "pos": None}
        target = {"own": PerRank(inner)}
        memory.load(stored, target, rank=rank, world_size=3)
        assert target["own"].value is inner
        assert inner["rng"].tolist() == [rank, rank]
        assert inner["pos"] == rank


def test_a_plain_value_per_rank_is_wrapped_again(memory):
    target = {"own": PerRank(0)}
    memory.load(save_per_rank(memory, [5, 6]), target, rank=1, world_size=2)
    assert target["own"] == PerRank(6)


def test_nothing_per_rank_takes_whatever_the_rank_had(memory):
    target = {"own": PerRank(None)}
    memory.load(save_per_rank(memory, [[torch.ones(2), 1]]), target)
    assert torch.equal(target["own"].value[0], torch.ones(2))
    assert target["own"].value[1] == 1


def test_another_number_of_ranks_is_a_problem_unless_ignored(memory):
    stored = save_per_rank(memory, [5, 6])
    for rank, world_size in ((0, 1), (0, 3), (2, 3)):
        (line,) = memory.problems(stored, {"own": PerRank(0)}, rank=rank, world_size=world_size)
        assert "'own'" in line
        assert "of 2 ranks" in line
        assert f"of {world_size}" in line
        target = {"own": PerRank(0)}
        memory.load(stored, target, rank=rank, world_size=world_size, options=RestoreOptions(ignore=("own",)))
        assert target["own"].value == 0


def test_the_number_of_ranks_that_saved_may_be_told(memory):
    stored = memory.store({0: capture({"own": PerRank(1)}, rank=0)})
    assert memory.problems(stored, {"own": PerRank(0)}, rank=0, world_size=2, saved_world_size=2) == ()
    assert memory.problems(stored, {"own": PerRank(0)}, rank=1, world_size=2, saved_world_size=2)


# objects with state_dict


class Loader:
    def __init__(self, position=0, buffer=(), order=None):
        self.position, self.buffer, self.order = position, list(buffer), order

    def state_dict(self):
        return {"position": self.position, "buffer": self.buffer, "order": self.order}

    def load_state_dict(self, state):
        self.position, self.buffer, self.order = state["position"], state["buffer"], state["order"]


def test_an_object_gets_what_it_gave(memory):
    saved = Loader(7, ["a", {"k": (1,)}], torch.arange(5))
    target = Loader()
    memory.load(memory.save({"loader": saved}), {"loader": target})
    assert (target.position, target.buffer) == (7, ["a", {"k": (1,)}])
    assert torch.equal(target.order, torch.arange(5))


def test_an_objects_own_tensors_are_filled_in_place_where_they_fit(memory):
    order = torch.zeros(5, dtype=torch.int64)
    target = Loader(order=order)
    memory.load(memory.save({"loader": Loader(order=torch.arange(5))}), {"loader": target})
    assert target.order is order
    assert order.tolist() == [0, 1, 2, 3, 4]


def test_an_objects_tensor_that_is_not_stored_is_missing(memory):
    class More(Loader):
        def state_dict(self):
            return super().state_dict() | {"extra": torch.zeros(1)}

    (line,) = memory.problems(memory.save({"loader": Loader()}), {"loader": More()})
    assert "missing 'loader.extra'" in line


def test_an_object_may_hold_modules_and_optimizers(memory):
    class App:
        def __init__(self, seed):
            self.model = net(seed)
            self.loaded = None

        def state_dict(self):
            return {"model": self.model.state_dict(), "live": self.model, "step": 3}

        def load_state_dict(self, state):
            self.loaded = state

    saved, target = App(1), App(2)
    memory.load(memory.save({"app": saved}), {"app": target})
    assert torch.equal(saved.model[0].weight, target.model[0].weight)
    assert target.loaded["live"] is target.model
    assert target.loaded["step"] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=50),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[2],
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_schedulers_go_on_as_if_nothing_had_happened(memory, make):
    def start():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}

    def advance(state, times):
        rates = []
        for _ in range(times):
            state["optimizer"].step()
            plateau = isinstance(state["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
            state["scheduler"].step(*([1.0] if plateau else []))
            rates.append(state["optimizer"].param_groups[0]["lr"])
        return rates

    saved, target = start(), start()
    advance(saved, 3)
    memory.load(memory.save(saved), target)
    assert type(target["scheduler"].__dict__.get("milestones")) is type(saved["scheduler"].__dict__.get("milestones"))
    assert advance(target, 6) == advance(saved, 6)


def test_a_scaler_goes_on(memory):
    saved, target = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    memory.load(memory.save({"scaler": saved}), {"scaler": target})
    assert target.get_scale() == 8.0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_was_off_does_not_load_into_one_that_is_on(memory, enabled):
    saved, target = (torch.amp.GradScaler("cpu", enabled=on) for on in (enabled, not enabled))
    (line,) = memory.problems(memory.save({"scaler": saved}), {"scaler": target})
    assert line.startswith("'scaler':")
    assert f"saved {'enabled' if enabled else 'disabled'}" in line


def test_keys_in_which_an_objects_state_differs_are_noted(memory):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    saved = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    target = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    restore = memory.load(memory.save({"s": saved}), {"s": target})
    assert any("'s': 1 keys of its state the target has not: step_size" in note for note in restore.notes)


def test_a_function_that_a_scheduler_holds_stays(memory):
    class Mine(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer, factor):
            self.shape = lambda k: k * factor
            super().__init__(optimizer)

        def get_lr(self):
            return [0.1]

    saved, target = (Mine(torch.optim.SGD([torch.zeros(1)], lr=0.1), factor) for factor in (2, 3))
    memory.load(memory.save({"s": saved}), {"s": target})
    assert target.shape(1) == 3


def test_what_runs_code_of_others_is_installed_last(memory):
    seen = []

    class Watches(Loader):
        def load_state_dict(self, state):  # noqa: ARG002
            seen.append((target["epoch"], target["optimizer"].param_groups[0]["lr"], target["model"].value))

    def make(epoch, lr):
        model = WithExtra(epoch)
        return {
            "loader": Watches(),
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=lr),
            "epoch": epoch,
        }

    target = make(0, 0.1)
    memory.load(memory.save(make(4, 0.5)), target)
    assert seen == [(4, 0.5, 4)]
