from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.adapters.restore import unexpected_keys
from vescale_ckpt.state.tree import DictNode, get


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))


def step(model, optimizer, n=2, start=0):
    for i in range(start, start + n):
        generator = torch.Generator().manual_seed(100 + i)
        data = torch.randn(5, 4, generator=generator)

        def closure(data=data):
            optimizer.zero_grad()
            loss = model(data).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()


def problems(memory, stored, state, **more):
    options = RestoreOptions(**{k: more.pop(k) for k in ("cast", "only", "ignore", "rename") if k in more})
    return memory.plan(stored, state, options=options, **more).problems


def same(a, b):
    """Assert that two optimizers have the same groups and state, to the bit and to the type."""
    one, other = a.state_dict(), b.state_dict()
    assert one["state"].keys() == other["state"].keys()
    for key, state in one["state"].items():
        assert state.keys() == other["state"][key].keys()
        for name, value in state.items():
            twin = other["state"][key][name]
            assert type(value) is type(twin), name
            if isinstance(value, torch.Tensor):
                assert value.dtype == twin.dtype
                assert value.device == twin.device
                assert torch.equal(value, twin), name
    assert len(one["param_groups"]) == len(other["param_groups"])
    for group, twin in zip(one["param_groups"], other["param_groups"], strict=True):
        assert group == twin


def goes_on(memory, make, n=2, fresh_steps=0):
    """Assert that what was saved goes on in a fresh optimizer, bit by bit as without the break."""
    model, optimizer = make()
    step(model, optimizer, n)
    stored = memory.save({"model": model, "optimizer": optimizer})
    twin, fresh = make()
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(0.5)
    step(twin, fresh, fresh_steps, start=50)
    for group in fresh.param_groups:
        group["lr"] = 77.0
    restore = memory.load(stored, {"model": twin, "optimizer": fresh})
    same(optimizer, fresh)
    step(model, optimizer, 3, start=n)
    step(twin, fresh, 3, start=n)
    same(optimizer, fresh)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    return restore


OPTIMIZERS = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.LBFGS, {"max_iter": 3, "history_size": 4}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("fresh_steps", [0, 1])
def test_every_optimizer_goes_on_from_a_fresh_one_and_from_a_used_one(memory, cls, options, fresh_steps):
    if cls is torch.optim.LBFGS and fresh_steps:
        fresh_steps = 3  # its history has another length then

    def make():
        model = net()
        return model, cls(model.parameters(), **options)

    goes_on(memory, make, fresh_steps=fresh_steps)


def test_muon_goes_on(memory):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def make():
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
        return model, torch.optim.Muon(model.parameters())

    goes_on(memory, make)


def test_sparse_adam_goes_on(memory):
    def make():
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters())

    model, optimizer = make()
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    twin, fresh = make()
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    same(optimizer, fresh)


# what is uneven


def frozen():
    model = net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def one_without_gradient():
    model = net()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model, torch.optim.AdamW(model.parameters())


def groups():
    model = net()
    return model, torch.optim.AdamW([
        {"params": model[0].parameters(), "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0},
        {"params": model[2].parameters(), "lr": 5e-4, "betas": (0.8, 0.99), "weight_decay": 0.1, "tag": "mid"},
        {"params": []},
        {"params": model[4].parameters(), "lr": 2e-4},
    ])  # fmt: skip


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def lora():
    model = net()
    model[0], model[2] = Lora(model[0]), Lora(model[2])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("make", [frozen, one_without_gradient, groups, lora])
@pytest.mark.parametrize("n", [0, 2])
def test_uneven_optimizers_go_on(memory, make, n):
    goes_on(memory, make, n=n)


def test_custom_keys_come_back_though_the_target_lacks_them(memory):
    model, optimizer = groups()
    twin, fresh = groups()
    del fresh.param_groups[1]["tag"]
    fresh.param_groups[3]["mine"] = 1
    restore = memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert fresh.param_groups[1]["tag"] == "mid"
    assert any("kept: mine" in note for note in restore.notes)


def test_state_of_a_parameter_that_has_none_stored_is_cleared(memory):
    model, optimizer = one_without_gradient()
    step(model, optimizer)
    twin, used = one_without_gradient()
    twin.unused.grad = torch.ones(3)
    step(twin, used, 1)
    twin.unused.grad = torch.ones(3)
    used.step()
    assert twin.unused in used.state
    restore = memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": used})
    same(optimizer, used)
    assert any("'o.state.unused'" in note and "cleared" in note for note in restore.notes)


def test_tensors_of_a_used_optimizer_are_filled_in_place(memory):
    model, optimizer = frozen()
    step(model, optimizer)
    twin, used = frozen()
    step(twin, used, 1)
    before = used.state[twin[2].weight]["exp_avg"]
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": used})
    assert used.state[twin[2].weight]["exp_avg"] is before


def test_planning_makes_no_state(memory):
    model, optimizer = groups()
    step(model, optimizer)
    twin, fresh = groups()
    before = copy.deepcopy(fresh.state_dict())
    memory.plan(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert len(fresh.state) == 0
    assert fresh.state_dict() == before


# steps in different places


def test_steps_come_back_where_they_were(memory):
    """Per parameter, per group, or both with different values: each where it was."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    optimizer.param_groups[0]["step"] = 9
    optimizer.state[model[0].weight]["step"].fill_(5)
    twin = net()
    fresh = torch.optim.AdamW(twin.parameters())
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert fresh.param_groups[0]["step"] == 9
    assert fresh.state[twin[0].weight]["step"].item() == 5
    assert fresh.state[twin[0].bias]["step"].item() == 2


def test_a_step_that_is_a_number_stays_one(memory):
    class Counts(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):  # noqa: ARG002
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("rows", torch.zeros(p.shape[0], 1))
            self.state["rounds"] = self.state.get("rounds", 0) + 1

    model, twin = net(), net()
    optimizer, fresh = Counts(model.parameters()), Counts(twin.parameters())
    optimizer.step()
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert fresh.state[twin[0].weight]["step"] == 1
    assert fresh.state[twin[0].weight]["rows"].shape == (6, 1)
    assert fresh.state["rounds"] == 1


# groups and parameters that do not meet


def two_groups(first, second):
    model = net()
    parts = {"a": model[0], "b": model[2], "c": model[4]}
    return model, torch.optim.AdamW(
        [{"params": [p for key in keys for p in parts[key].parameters()]} for keys in (first, second)]
    )


def saved_with(memory, make):
    model, optimizer = make
    step(model, optimizer)
    return memory.save({"m": model, "o": optimizer})


def target_with(make):
    return dict(zip(("m", "o"), make, strict=True))


def test_groups_in_another_order_are_matched_by_name(memory):
    model, optimizer = two_groups("a", "bc")
    optimizer.param_groups[0]["lr"] = 0.25
    stored = memory.save({"m": model, "o": optimizer})
    target = target_with(two_groups("cb", "a"))
    memory.load(stored, target)
    assert [group["lr"] for group in target["o"].param_groups] == [1e-3, 0.25]


def test_merged_and_split_groups_are_problems(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    (line,) = problems(memory, stored, target_with(two_groups("abc", "")))
    assert "'o.param_groups.0'" in line
    assert "in one group" in line
    (line,) = problems(memory, stored, target_with(split_groups()))
    assert "in groups" in line


def split_groups():
    model = net()
    return model, torch.optim.AdamW([
        {"params": model[0].parameters()},
        {"params": model[2].parameters()},
        {"params": model[4].parameters()},
    ])  # fmt: skip


def test_state_of_parameters_that_the_target_does_not_own_is_unexpected(memory):
    stored = saved_with(memory, two_groups("ab", "c"))
    found = problems(memory, stored, target_with(two_groups("a", "c")))
    assert all(line.startswith("unexpected 'o.state.2.") for line in found)
    assert len(found) == 2
    assert problems(memory, stored, target_with(two_groups("a", "c")), ignore=("o.state.2",)) == ()


def test_a_lost_group_is_unexpected(memory):
    stored = saved_with(memory, two_groups("ab", "c"))
    model = net()
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()])
    found = problems(memory, stored, {"m": model, "o": optimizer})
    assert [line.split(":")[0] for line in found] == [
        "unexpected 'o.state.4.weight'",
        "unexpected 'o.state.4.bias'",
        "unexpected 'o.param_groups.1'",
    ]


def test_a_parameter_that_no_stored_group_has_is_missing(memory):
    stored = saved_with(memory, two_groups("a", "b"))
    found = problems(memory, stored, target_with(two_groups("ac", "b")))
    assert [line.split(":")[0] for line in found] == ["missing 'o.state.4.weight'", "missing 'o.state.4.bias'"]
    assert problems(memory, stored, target_with(two_groups("ac", "b")), ignore=("o.state.4",)) == ()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_partly_missing_state_is_a_problem(memory, steps):
    model, optimizer = two_groups("a", "bc")
    step(model, optimizer)
    del optimizer.state[model[2].weight]["exp_avg_sq"]
    stored = memory.save({"m": model, "o": optimizer})
    target = target_with(two_groups("a", "bc"))
    step(target["m"], target["o"], steps)
    (line,) = problems(memory, stored, target)
    assert "'o.state.2.weight'" in line
    assert "not exp_avg_sq" in line
    restore = memory.load(stored, target, options=RestoreOptions(ignore=("o.state.*.exp_avg_sq",)))
    state = target["o"].state[target["m"][2].weight]
    assert state.keys() == ({"step", "exp_avg", "exp_avg_sq"} if steps else {"step", "exp_avg"})
    assert any("exp_avg_sq" in note for note in restore.notes)


def test_state_that_an_option_switches_off_is_dropped_with_it(memory):
    model, optimizer = two_groups("a", "bc")
    step(model, optimizer)
    twin = net()
    used = torch.optim.AdamW(
        [{"params": [*twin[0].parameters()]}, {"params": [*twin[2].parameters(), *twin[4].parameters()]}], amsgrad=True
    )
    step(twin, used)
    restore = memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": used})
    same(optimizer, used)
    assert any("dropped from the target: max_exp_avg_sq" in note for note in restore.notes)


def test_an_optimizer_stored_by_position_is_refused_with_a_way_out(memory):
    model, optimizer = two_groups("a", "bc")
    step(model, optimizer)
    stored = memory.save({"m": model, "o": optimizer.state_dict()})
    (line,) = problems(memory, stored, target_with(two_groups("a", "bc")))
    assert "'o'" in line
    assert "load_state_dict" in line


def test_an_empty_template_against_moments_is_a_problem(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    model, optimizer = two_groups("a", "bc")
    (line,) = problems(memory, stored, {"m": model, "o": {"state": {}, "param_groups": []}}, ignore=("o.param_groups",))
    assert "unexpected 'o.state'" in line
    assert "18 tensors" in line
    assert "pass the optimizer itself" in line
    assert problems(memory, stored, {"m": model, "o": 3})
    assert problems(memory, memory.save({"m": model, "o": {"x": 1}}), {"m": model, "o": optimizer})


def test_only_the_model_or_only_the_optimizer(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    target = target_with(split_groups())  # other groups: never looked at
    memory.load(stored, target, options=RestoreOptions(only=("m",)))
    assert len(target["o"].state) == 0
    target = target_with(two_groups("a", "bc"))
    before = target["m"][0].weight.detach().clone()
    memory.load(stored, target, options=RestoreOptions(only=("o",)))
    assert len(target["o"].state) == 6
    assert torch.equal(target["m"][0].weight, before)


# names


def test_two_optimizers_over_one_model_keep_their_states_apart(memory):
    def make():
        model = net()
        return {
            "first": torch.optim.AdamW(model[0].parameters()),
            "second": torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1, momentum=0.9),
            "model": model,
        }

    saved, target = make(), make()
    for key in ("first", "second"):
        step(saved["model"], saved[key])
    memory.load(memory.save(saved), target)
    same(saved["first"], target["first"])
    same(saved["second"], target["second"])


def test_one_optimizer_over_two_models_whose_names_meet(memory):
    def make(seed):
        torch.manual_seed(seed)
        models = {"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)}
        return models | {"o": torch.optim.AdamW([p for m in models.values() for p in m.parameters()])}

    saved, target = make(1), make(2)
    step(nn.Sequential(saved["g"], saved["d"]), saved["o"])
    stored = memory.save(saved)
    assert ("o", "state", "d.weight", "exp_avg") in stored.tensors
    memory.load(stored, target)
    same(saved["o"], target["o"])
    alone = {"g": target["g"], "o": torch.optim.AdamW(target["g"].parameters())}
    assert problems(memory, stored, alone, ignore=("d", "o.state.d")) == ()


def test_names_that_two_parameters_would_share_are_a_problem(memory):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    stored = memory.save({"g": model, "o": optimizer})
    g, d = nn.Linear(4, 4), nn.Linear(4, 4)
    both = torch.optim.AdamW([*g.parameters(), *d.parameters()])
    found = problems(memory, stored, {"g": g, "d": d, "o": both}, ignore=("d",))
    assert any("go by the name 'weight'" in line for line in found)


class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def tied(tie, *, reverse=False):
    torch.manual_seed(3)
    model = Tied(tie)
    parameters = list(model.parameters())
    return {"m": model, "o": torch.optim.AdamW(parameters[::-1] if reverse else parameters)}


def test_a_tied_parameter_has_one_state_under_any_of_its_names(memory):
    saved, target = tied(tie=True), tied(tie=True)
    step(saved["m"], saved["o"])
    memory.load(memory.save(saved), target)
    same(saved["o"], target["o"])


def test_a_parameter_that_was_tied_when_saved(memory):
    """As on two pipeline stages: each has the tied one under its own name."""
    saved, target = tied(tie=True), tied(tie=False)
    step(saved["m"], saved["o"])
    memory.load(memory.save(saved), target)
    expected = saved["o"].state[saved["m"].a.weight]["exp_avg"]
    for p in (target["m"].a.weight, target["m"].b.weight):
        assert torch.equal(target["o"].state[p]["exp_avg"], expected)
    step(target["m"], target["o"], 1)
    assert {state["step"].item() for state in target["o"].state.values()} == {3.0}  # each counts for itself


def test_a_parameter_that_was_not_tied_when_saved(memory):
    saved, target = tied(tie=False), tied(tie=True)
    step(saved["m"], saved["o"])
    stored = memory.save(saved)
    restore = memory.load(stored, target, same_content=lambda *_: True)
    state = target["o"].state[target["m"].a.weight]
    assert torch.equal(state["exp_avg"], saved["o"].state[saved["m"].a.weight]["exp_avg"])
    assert any("'b.weight'" in note for note in restore.notes)


def test_renamed_parameters_bring_their_state(memory):
    model = nn.ModuleDict({"enc": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    step(model["enc"], optimizer)
    twin = nn.ModuleDict({"encoder": nn.Linear(4, 4)})
    fresh = torch.optim.AdamW(twin.parameters())
    stored = memory.save({"net": model, "o": optimizer})
    options = RestoreOptions(rename={"model": "net", "model.encoder": "net.enc"})
    memory.load(stored, {"model": twin, "o": fresh}, options=options)
    same(optimizer, fresh)


def test_a_state_dict_by_name_is_filled_from_an_optimizer(memory):
    """As torch.distributed.checkpoint's get_optimizer_state_dict makes it."""
    model, optimizer = two_groups("a", "bc")
    step(model, optimizer)
    stored = memory.save({"m": model, "o": optimizer})
    names = {p: name for name, p in model.named_parameters()}
    template = {
        "state": {names[p]: {k: torch.zeros_like(v) for k, v in s.items()} for p, s in optimizer.state.items()},
        "param_groups": [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups],
    }
    memory.load(stored, {"m": model, "o": template})
    assert torch.equal(template["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    # and the other way round
    twin, fresh = two_groups("a", "bc")
    memory.load(memory.save({"m": model, "o": template}), {"m": twin, "o": fresh})
    same(optimizer, fresh)


# dtypes and shapes


def test_moments_follow_their_parameter_where_casts_are_allowed(memory):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    stored = memory.save({"m": model, "o": optimizer})
    twin = net().bfloat16()
    fresh = torch.optim.AdamW(twin.parameters())
    assert problems(memory, stored, {"m": twin, "o": fresh})
    restore = memory.load(stored, {"m": twin, "o": fresh}, options=RestoreOptions(cast=True))
    state = fresh.state[twin[0].weight]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["step"].dtype == torch.float32
    assert any("'o.state.0.weight.exp_avg': cast" in note for note in restore.notes)
    twin(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    fresh.step()


def test_masters_keep_their_dtype(memory):
    """State of another dtype than its parameter was saved so on purpose."""

    class Masters(torch.optim.SGD):
        def step(self, closure=None):  # noqa: ARG002
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("master", p.detach().float() + 1e-6)

    def make():
        model = net().bfloat16()
        return {"m": model, "o": Masters(model.parameters(), lr=0.1)}

    saved, target = make(), make()
    saved["o"].step()
    for options in (RestoreOptions(), RestoreOptions(cast=True)):
        memory.load(memory.save(saved), target, options=options)
        same(saved["o"], target["o"])


def test_moments_of_another_shape_than_the_parameter_are_a_problem(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW([
        {"params": model[0].parameters()},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ])  # fmt: skip
    found = problems(memory, stored, {"m": model, "o": optimizer})
    assert any("'o.state.2.weight.exp_avg'" in line and "[3, 6]" in line and "[5, 6]" in line for line in found)
    assert any(line.startswith("'m.2.weight'") for line in found)


def test_a_model_without_memory_is_all_problems_and_no_crash(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    with torch.device("meta"):
        target = target_with(two_groups("a", "bc"))
    found = problems(memory, stored, target)
    assert len(found) == 6 + 12
    assert all("meta device" in line for line in found)


def test_another_kind_of_optimizer_is_a_problem(memory):
    model = net()
    saved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, saved)
    stored = memory.save({"m": model, "o": saved})
    target = {"m": net()}
    target["o"] = torch.optim.AdamW(target["m"].parameters())
    (line,) = problems(memory, stored, target)
    assert "'o.param_groups.0'" in line
    assert "AdamW has betas, eps" in line
    assert problems(memory, stored, target, ignore=("o.param_groups.*.betas", "o.param_groups.*.eps")) == ()


# layouts


def test_state_is_made_on_the_mesh_of_its_parameter(memory, fake_world):
    fake_world(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    saved = {"m": nn.Linear(3, 5, bias=False)}
    saved["o"] = torch.optim.Adafactor(saved["m"].parameters())
    saved["m"](torch.ones(1, 3)).sum().backward()
    saved["o"].step()
    saved["o"].state[saved["m"].weight]["like"] = torch.arange(15.0).reshape(5, 3)
    stored = memory.save(saved)
    module = nn.Linear(3, 5, bias=False)
    local = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1))
    module.weight = nn.Parameter(local)
    optimizer = torch.optim.Adafactor(module.parameters())
    restore = memory.load(stored, {"m": module, "o": optimizer}, rank=0, world_size=2)
    assert restore.problems == ()
    state = optimizer.state[module.weight]
    assert state["like"].placements == (Shard(0),)
    assert state["like"].to_local().tolist() == [[9.0, 10.0, 11.0], [12.0, 13.0, 14.0]]
    assert state["row_var"].placements == (Replicate(),)
    assert torch.equal(state["row_var"].to_local(), saved["o"].state[saved["m"].weight]["row_var"])
    assert type(state["step"]) is torch.Tensor


def test_a_stage_takes_its_part_of_groups(memory):
    """Two stages, each with a part of every group and one of them with nothing of the second."""
    model, optimizer = two_groups("ab", "c")
    step(model, optimizer)
    stored = memory.save({"m": model, "o": optimizer})

    def stage(part, first, second):
        return {"m": part, "o": torch.optim.AdamW([{"params": first}, {"params": second}], lr=9.0)}

    parts = [nn.ModuleDict({"0": nn.Linear(4, 6)}), nn.ModuleDict({"2": nn.Linear(6, 3), "4": nn.Linear(3, 2)})]
    targets = [
        stage(parts[0], parts[0].parameters(), []),
        stage(parts[1], parts[1]["2"].parameters(), parts[1]["4"].parameters()),
    ]
    taken = [memory.load(stored, t, rank=r, world_size=2).taken for r, t in enumerate(targets)]
    assert unexpected_keys(stored.tree, taken[0] | taken[1], RestoreOptions()) == ()
    assert unexpected_keys(stored.tree, taken[0], RestoreOptions())
    assert torch.equal(
        targets[1]["o"].state[parts[1]["4"].weight]["exp_avg"], optimizer.state[model[4].weight]["exp_avg"]
    )
    assert targets[0]["o"].param_groups[1]["lr"] == 1e-3


def test_groups_of_stages_are_united_when_saved(memory):
    parts = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})]
    captured = {
        r: capture({"m": part, "o": torch.optim.AdamW(part.parameters())}, rank=r) for r, part in enumerate(parts)
    }
    group = get(memory.store(captured).tree, ("o", "param_groups", 0, "params"))
    assert isinstance(group, DictNode)
    assert [name for name, _ in group.items] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_damaged_stored_state_is_a_problem_and_no_crash(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    for damage in (
        lambda items: {**items, "state": DictNode((("0.weight", get(stored.tree, ("m", "0.weight"))),))},
        lambda items: {"state": items["state"]},
        lambda items: {**items, "param_groups": items["state"]},
    ):
        model, (_, node) = stored.tree.items
        optimizer = DictNode(tuple(damage(dict(node.items)).items()))
        damaged = dataclasses.replace(stored, tree=DictNode((model, ("o", optimizer))))
        assert problems(memory, damaged, target_with(two_groups("a", "bc")))
