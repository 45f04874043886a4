from __future__ import annotations

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
    (line,) = memory.problems(stored, target_with(two_groups("abc", "")))
    assert "'o.param_groups.0'" in line
    assert "in one group" in line
    (line,) = memory.problems(stored, target_with(split_groups()))
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
    found = memory.problems(stored, target_with(two_groups("a", "c")))
    assert all(line.startswith("unexpected 'o.state.2.") for line in found)
    assert len(found) == 2
    assert memory.problems(stored, target_with(two_groups("a", "c")), ignore=("o.state.2",)) == ()


def test_a_lost_group_is_unexpected(memory):
    stored = saved_with(memory, two_groups("ab", "c"))
    model = net()
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()])
    found = memory.problems(stored, {"m": model, "o": optimizer})
    assert [line.split(":")[0] for line in found] == [
        "unexpected 'o.state.4.weight'",
        "unexpected 'o.state.4.bias'",
        "unexpected 'o.param_groups.1'",
    ]


def test_a_parameter_that_no_stored_group_has_is_missing(memory):
    stored = saved_with(memory, two_groups("a", "b"))
    found = memory.problems(stored, target_with(two_groups("ac", "b")))
    assert [line.split(":")[0] for line in found] == ["missing 'o.state.4.weight'", "missing 'o.state.4.bias'"]
    assert memory.problems(stored, target_with(two_groups("ac", "b")), ignore=("o.state.4",)) == ()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_partly_missing_state_is_a_problem(memory, steps):
    model, optimizer = two_groups("a", "bc")
    step(model, optimizer)
    del optimizer.state[model[2].weight]["exp_avg_sq"]
    stored = memory.save({"m": model, "o": optimizer})
    target = target_with(two_groups("a", "bc"))
    step(target["m"], target["o"], steps)
    (line,) = memory.problems(stored, target)
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
    memory.same_optimizers(optimizer, used)
    assert any("dropped from the target: max_exp_avg_sq" in note for note in restore.notes)


def test_an_optimizer_stored_by_position_is_refused_with_a_way_out(memory):
    model, optimizer = two_groups("a", "bc")
    step(model, optimizer)
    stored = memory.save({"m": model, "o": optimizer.state_dict()})
    (line,) = memory.problems(stored, target_with(two_groups("a", "bc")))
    assert "'o'" in line
    assert "load_state_dict" in line


def test_an_empty_template_against_moments_is_a_problem(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    model, optimizer = two_groups("a", "bc")
    (line,) = memory.problems(stored, {"m": model, "o": {"state": {}, "param_groups": []}}, ignore=("o.param_groups",))
    assert "unexpected 'o.state'" in line
    assert "18 tensors" in line
    assert "pass the optimizer itself" in line
    assert memory.problems(stored, {"m": model, "o": 3})
    assert memory.problems(memory.save({"m": model, "o": {"x": 1}}), {"m": model, "o": optimizer})


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


# dtypes and shapes


def test_moments_follow_their_parameter_where_casts_are_allowed(memory):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    stored = memory.save({"m": model, "o": optimizer})
    twin = net().bfloat16()
    fresh = torch.optim.AdamW(twin.parameters())
    assert memory.problems(stored, {"m": twin, "o": fresh})
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
        memory.same_optimizers(saved["o"], target["o"])


def test_moments_of_another_shape_than_the_parameter_are_a_problem(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW([
        {"params": model[0].parameters()},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ])  # fmt: skip
    found = memory.problems(stored, {"m": model, "o": optimizer})
    assert any("'o.state.2.weight.exp_avg'" in line and "[3, 6]" in line and "[5, 6]" in line for line in found)
    assert any(line.startswith("'m.2.weight'") for line in found)


def test_a_model_without_memory_is_all_problems_and_no_crash(memory):
    stored = saved_with(memory, two_groups("a", "bc"))
    with torch.device("meta"):
        target = target_with(two_groups("a", "bc"))
    found = memory.problems(stored, target)
    assert len(found) == 6 + 12
    assert all("meta device" in line for line in found)


def test_another_kind_of_optimizer_is_a_problem(memory):
    model = net()
    saved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, saved)
    stored = memory.save({"m": model, "o": saved})
    target = {"m": net()}
    target["o"] = torch.optim.AdamW(target["m"].parameters())
    (line,) = memory.problems(stored, target)
    assert "'o.param_groups.0'" in line
    assert "AdamW has betas, eps" in line
    assert memory.problems(stored, target, ignore=("o.param_groups.*.betas", "o.param_groups.*.eps")) == ()


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
        assert memory.problems(damaged, target_with(two_groups("a", "bc")))
