"""C104 and C112 to C122: runs that went on, but not as if nothing had happened."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import vescale_ckpt as vc
from tests.cases.inputs import assert_same, leaves, local_of, same_bits, tagged
from tests.cases.worlds import RUN, load, memory_store, save, try_load
from vescale_ckpt.errors import MismatchError, RankFailureError
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Shard

SCRIPT = Path(__file__).with_name("resume_process.py")


def saved(state: object) -> vc.Store:
    store = memory_store()
    save(store, 1, lambda _: state)
    return store


def loaded(store: vc.Store, state: object, **options: object) -> vc.LoadReport:
    (report,) = load(store, 1, lambda _: state, **options)
    return report


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, n: int = 2, start: int = 0) -> None:
    for i in range(start, start + n):
        generator = torch.Generator().manual_seed(100 + i)
        model(torch.randn(5, 4, generator=generator)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Require equal states; the keys of a group may stand in another order."""
    one, other = (dict(leaves(optimizer.state_dict())) for optimizer in (a, b))
    assert_same({key: one[key] for key in sorted(one, key=repr)}, {key: other[key] for key in sorted(other, key=repr)})


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict]:
    """What the uninterrupted run came to, and what new processes with other seeds came to from half-way."""
    folder = tmp_path_factory.mktemp("resume")
    found = []
    for verb, seed in (("save", 1), ("resume", 987)):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), verb, str(folder), str(seed)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found


@pytest.mark.parametrize("kind", ["adamw", "groups", "sgd", "masters"])
def test_a_whole_run_goes_on_to_the_last_bit_in_a_new_process_with_another_seed(runs, kind):
    uninterrupted, resumed = (run[kind] for run in runs)
    assert len(set(uninterrupted["losses"])) == 9
    assert resumed == uninterrupted


class TestC104WhereTheStepIs:
    def test_each_is_restored_where_it_was(self):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer, n=3)
        for group in optimizer.param_groups:
            group["step"] = 40  # as fused optimizers keep it
        optimizer.state[model[0].weight]["step"] = torch.tensor(17.0)
        store = saved({"model": model, "optimizer": optimizer})
        target = net(5)
        other = torch.optim.Adam(target.parameters())
        for group in other.param_groups:
            group["step"] = 0
        loaded(store, {"model": target, "optimizer": other})
        assert other.param_groups[0]["step"] == 40
        assert other.state[target[0].weight]["step"].item() == 17
        assert other.state[target[0].bias]["step"].item() == 3
        same_state(optimizer, other)
        for m, o in ((model, optimizer), (target, other)):
            step(m, o, n=1, start=9)
        assert_same(model.state_dict(), target.state_dict())


class TestC112ValuesAndGroups:
    def test_every_value_and_every_group(self):
        model = net()
        optimizer = torch.optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0},
                {"params": model[2].parameters(), "lr": 5e-4, "betas": (0.8, 0.99), "weight_decay": 0.1, "tag": "mid"},
                {"params": []},
                {"params": model[4].parameters(), "lr": 2e-4, "note": {"a": [1, None]}},
            ]
        )
        step(model, optimizer)
        optimizer.param_groups[3]["lr"] = 7e-5
        extra = {"epoch": 3, "lr": 0.1, "name": "x", "best": float("inf"), "flags": [True, None], 7: 8}
        store = saved({"model": model, "optimizer": optimizer, "extra": extra})
        target = net(5)
        groups = [target[0].parameters(), target[2].parameters(), [], target[4].parameters()]
        other = torch.optim.AdamW([{"params": group} for group in groups])
        values = {"epoch": 0, "lr": 0.0, "name": "", "best": 0.0, "flags": [False, 1], 7: 0}
        loaded(store, {"model": target, "optimizer": other, "extra": values})
        assert values == extra
        same_state(optimizer, other)
        assert other.param_groups[1]["tag"] == "mid"
        assert other.param_groups[3]["note"] == {"a": [1, None]}
        for m, o in ((model, optimizer), (target, other)):
            step(m, o, n=2, start=5)  # an empty group does not break it
        assert_same(model.state_dict(), target.state_dict())

    def test_a_target_with_fewer_groups_is_an_error(self):
        model, target = net(), net(5)
        rest = [*model[2].parameters(), *model[4].parameters()]
        two = torch.optim.SGD([{"params": model[0].parameters()}, {"params": rest, "lr": 0.5}], lr=0.1)
        store = saved({"model": model, "optimizer": two})
        with pytest.raises(MismatchError, match="group"):
            loaded(store, {"model": target, "optimizer": torch.optim.SGD(target.parameters(), lr=0.1)})


class TestC114StateThatIsMadeLate:
    def test_an_optimizer_that_has_not_stepped(self):
        model, target = net(), net(5)
        optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(target.parameters())
        step(model, optimizer)
        loaded(saved({"model": model, "optimizer": optimizer}), {"model": target, "optimizer": other})
        same_state(optimizer, other)

    def test_a_parameter_that_never_had_a_gradient_and_nothing_stepped_at_all(self):
        for steps in (0, 2):
            model, target = net(), net(5)
            for m in (model, target):
                m.register_parameter("unused", nn.Parameter(torch.ones(3)))
            optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(target.parameters())
            step(model, optimizer, n=steps)
            step(target, other, n=1)
            loaded(saved({"model": model, "optimizer": optimizer}), {"model": target, "optimizer": other})
            assert not other.state.get(target.unused)
            same_state(optimizer, other)

    def test_a_partly_missing_state_of_one_parameter_is_an_error(self):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        del optimizer.state[model[2].weight]["exp_avg_sq"]
        store = saved({"model": model, "optimizer": optimizer})
        target = net(5)
        other = torch.optim.AdamW(target.parameters())
        step(target, other)
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(MismatchError, match=r"2\.weight.*exp_avg_sq"):
            loaded(store, {"model": target, "optimizer": other})
        assert_same(other.state_dict(), before)

    def test_moments_against_an_empty_template_are_an_error(self):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        store = saved({"model": model, "optimizer": optimizer})
        target = net(5)
        empty = torch.optim.AdamW(target.parameters()).state_dict()
        with pytest.raises(MismatchError, match=r"optimizer\.state.*18 tensors"):
            loaded(store, {"model": target, "optimizer": empty})


class TestC116Masters:
    def test_masters_come_back_to_the_bit_and_not_from_the_weights(self):
        weights = tagged(50, 40).to(torch.bfloat16)
        masters = weights.float() + torch.rand(50, 40) * 2**-10
        assert not same_bits(masters, weights.float())
        store = saved({"model": {"w": weights}, "masters": {"w": masters}})
        target = {"model": {"w": torch.zeros_like(weights)}, "masters": {"w": torch.zeros_like(masters)}}
        loaded(store, target)
        assert same_bits(target["masters"]["w"], masters)
        assert same_bits(target["model"]["w"], weights)

    def test_a_snapshot_without_masters_is_an_error_where_the_run_needs_them(self):
        weights = tagged(5, 4).to(torch.bfloat16)
        store = saved({"model": {"w": weights}})
        with pytest.raises(MismatchError, match="'masters'"):
            loaded(store, {"model": {"w": torch.zeros_like(weights)}, "masters": {"w": torch.zeros(5, 4)}})

    def test_a_snapshot_with_masters_is_an_error_where_the_run_has_lost_the_flag(self):
        weights = tagged(5, 4).to(torch.bfloat16)
        store = saved({"model": {"w": weights}, "masters": {"w": weights.float()}})
        with pytest.raises(MismatchError, match="'masters'"):
            loaded(store, {"model": {"w": torch.zeros_like(weights)}})


class TestC120LoaderPositionsPerRank:
    @pytest.mark.parametrize("num_ranks", [1, 2, 8])
    def test_they_are_refused_both_ways_and_nothing_is_dropped(self, num_ranks):
        store = memory_store()
        save(store, 4, lambda rank: {"loader": vc.PerRank({"at": 10 * rank, "seen": tagged(rank + 1)}), "epoch": 2})
        targets = [{"loader": vc.PerRank({"at": 0, "seen": torch.zeros(1)}), "epoch": 0} for _ in range(num_ranks)]
        outcomes = try_load(store, num_ranks, lambda rank: targets[rank])
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert "'loader'" in str(outcomes[0])
        assert "of 4 ranks" in str(outcomes[0])
        assert all(target["epoch"] == 0 for target in targets), "nothing is touched"
        reports = load(store, num_ranks, lambda rank: targets[rank], ignore=["loader"])
        assert all("loader" in " ".join(report.notes) for report in reports)
        positions = store[RUN].state_dict()["loader"]
        assert {rank: value["at"] for rank, value in positions.items()} == {0: 0, 1: 10, 2: 20, 3: 30}

    def test_they_go_back_to_their_rank(self):
        store = memory_store()
        save(store, 4, lambda rank: {"loader": vc.PerRank({"at": 10 * rank, "seen": tagged(rank + 1)})})
        targets = [{"loader": vc.PerRank({"at": 0, "seen": torch.zeros(rank + 1)})} for rank in range(4)]
        load(store, 4, lambda rank: targets[rank])
        for rank, target in enumerate(targets):
            assert target["loader"].value["at"] == 10 * rank
            assert same_bits(target["loader"].value["seen"], tagged(rank + 1))


class TestC122Adapters:
    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_every_ranks_slice_of_an_adapter_comes_back(self, num_ranks):
        rows = Layout((2,), (Shard(0),))
        full = {"lora.a": torch.cat([torch.full((1, 8), float(r)) for r in (1, 2)]), "lora.b": tagged(6, 2)}

        def state(world_size: int, rank: int, *, fill: bool) -> dict:
            layout = Layout((world_size,), (Shard(0),))
            made = {}
            for name, tensor in full.items():
                local = local_of(tensor, layout, (rank,))
                made[name] = vc.ShardedView.laid_out(
                    local if fill else torch.zeros_like(local), tuple(tensor.shape), layout, (rank,)
                )
            return made

        store = memory_store()
        save(store, 2, lambda rank: state(2, rank, fill=True))
        assert same_bits(local_of(store[RUN].read("lora.a"), rows, (1,)), torch.full((1, 8), 2.0))
        targets = [state(num_ranks, rank, fill=False) for rank in range(num_ranks)]
        load(store, num_ranks, lambda rank: targets[rank])
        for rank, target in enumerate(targets):
            for name, view in target.items():
                right = local_of(full[name], Layout((num_ranks,), (Shard(0),)), (rank,))
                assert same_bits(view.pieces[0][1], right) if view.pieces else right.numel() == 0

    def test_only_the_adapters_of_a_model(self):
        model, target = net(), net(5)
        for m in (model, target):
            m.register_parameter("lora", nn.Parameter(torch.randn(2, 3)))
        store = saved({"model": {"lora": model.lora}})
        before = target[0].weight.detach().clone()
        loaded(store, {"model": target}, only=["model.lora"])
        assert same_bits(target.lora.detach(), model.lora.detach())
        assert same_bits(target[0].weight.detach(), before)

    def test_two_optimizers_over_one_model_keep_their_states_apart(self):
        def make(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
            model = net(seed)
            adam = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
            sgd = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1, momentum=0.9)
            return model, [adam, sgd]

        (model, optimizers), (target, others) = make(0), make(5)
        step(model, *optimizers)
        store = saved({"model": model, "optimizers": optimizers})
        loaded(store, {"model": target, "optimizers": others})
        for a, b in zip(optimizers, others, strict=True):
            same_state(a, b)
        step(model, *optimizers, start=7)
        step(target, *others, start=7)
        assert_same(model.state_dict(), target.state_dict())
