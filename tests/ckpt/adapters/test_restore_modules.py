from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.modules import WithExtra
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.adapters.restore import unexpected_keys


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_module_is_filled_in_place(memory):
    saved, target = net(1), net(2)
    saved(torch.ones(5, 3))
    before = [(p, p.data_ptr()) for p in target.parameters()]
    memory.load(memory.save({"m": saved}), {"m": target})
    memory.same_states(dict(saved.state_dict()), dict(target.state_dict()))
    assert [(p, p.data_ptr()) for p in target.parameters()] == before
    assert all(p.requires_grad and p.grad is None for p in target.parameters())


def test_modules_and_their_state_dicts_are_the_same_in_a_store(memory):
    saved, target = net(1), net(2)
    memory.load(memory.save({"m": saved.state_dict()}), {"m": target})
    memory.same_states(dict(saved.state_dict()), dict(target.state_dict()))
    other = net(3).state_dict()
    memory.load(memory.save({"m": saved}), {"m": other})
    memory.same_states(dict(saved.state_dict()), dict(other))


def test_a_compiled_module_loads_what_a_plain_one_saved(memory):
    saved, target = net(1), net(2)
    memory.load(memory.save({"m": saved}), {"m": torch.compile(target, backend="eager")})
    assert torch.equal(saved[0].weight, target[0].weight)


def test_keys_of_modules_that_do_not_meet(memory):
    stored = memory.save({"m": net()})
    target = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2), nn.Linear(1, 1))
    found = memory.problems(stored, {"m": target})
    assert [line.split(":")[0] for line in found] == [
        "missing 'm.3.weight'",
        "missing 'm.3.bias'",
        *(f"unexpected 'm.1.{name}'" for name in net()[1].state_dict()),
    ]
    assert memory.problems(stored, {"m": target}, ignore=("m.1", "m.3")) == ()


def test_ranks_may_hold_parts_and_what_none_holds_is_unexpected(memory):
    stored = memory.save({"m": net()})
    parts = [nn.ModuleDict({name: net()[int(name)]}) for name in "02"]
    restores = [memory.plan(stored, {"m": part}, rank=r, world_size=2) for r, part in enumerate(parts)]
    assert [restore.problems for restore in restores] == [(), ()]
    lines = unexpected_keys(stored.tree, restores[0].taken | restores[1].taken, RestoreOptions())
    assert all("'m.1." in line for line in lines)
    assert len(lines) == 5
    assert unexpected_keys(stored.tree, restores[0].taken, RestoreOptions(ignore=("m",))) == ()


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        if tie:
            self.b.weight = self.a.weight


def test_a_tie_on_both_sides_is_filled_once(memory):
    saved, target = Tied(), Tied()
    stored = memory.save({"m": saved})
    restore = memory.load(stored, {"m": target})
    assert sum(bool(leaf.pieces) for leaf in restore.leaves) == 3
    (alias,) = [leaf for leaf in restore.leaves if leaf.alias_of]
    assert (alias.path, alias.alias_of) == (("m", "b.weight"), ("m", "a.weight"))
    assert target.a.weight is target.b.weight
    assert torch.equal(target.b.weight, saved.a.weight)


def test_a_stored_tie_fills_two_tensors_of_the_target(memory):
    saved, target = Tied(), Tied(tie=False)
    memory.load(memory.save({"m": saved}), {"m": target})
    assert torch.equal(target.a.weight, saved.a.weight)
    assert torch.equal(target.b.weight, saved.a.weight)
    assert target.a.weight is not target.b.weight


def test_a_name_that_is_not_stored_is_filled_through_its_tie(memory):
    for left_out in ("a.weight", "b.weight"):
        state = {k: v for k, v in Tied().state_dict().items() if k != left_out}
        target = Tied()
        restore = memory.load(memory.save({"m": state}), {"m": target})
        assert torch.equal(target.a.weight, next(v for k, v in state.items() if k.endswith("weight")))
        assert any(f"'m.{left_out}' is not stored" in note for note in restore.notes)


def test_two_stored_tensors_for_one_of_the_target_must_be_equal(memory):
    saved, target = Tied(tie=False), Tied()
    stored = memory.save({"m": saved})
    (line,) = memory.problems(stored, {"m": target})
    assert "'m.b.weight'" in line
    assert "'m.a.weight'" in line
    assert memory.problems(stored, {"m": target}, ignore=("m.b.weight",)) == ()
    asked = []
    assert memory.problems(stored, {"m": target}, same_content=lambda *pair: asked.append(pair) is None) == ()
    assert asked == [(("m", "a.weight"), ("m", "b.weight"))]
    assert memory.problems(stored, {"m": target}, same_content=lambda *_: False)


@pytest.mark.parametrize(
    "value", [{"amax": torch.arange(4.0), "n": 1}, io.BytesIO(b"xy"), torch.empty(0, dtype=torch.uint8), b"", None, 3]
)
def test_extra_state_is_given_back(memory, value):
    target = WithExtra(copy.deepcopy(value))
    if isinstance(value, dict):
        target.value["amax"].zero_()
    memory.load(memory.save({"m": WithExtra(value)}), {"m": target})
    memory.same_states({"v": target.value}, {"v": value})


def test_extra_state_that_is_not_stored_is_a_problem_unless_ignored(memory):
    plain = nn.Module()
    plain.w = nn.Parameter(torch.zeros(2))
    stored = memory.save({"m": plain})
    (line,) = memory.problems(stored, {"m": WithExtra(1)})
    assert "missing 'm._extra_state'" in line
    target = WithExtra(1)
    memory.load(stored, {"m": target}, options=RestoreOptions(ignore=("*._extra_state",)))
    assert target.value == 1
    (line,) = memory.problems(memory.save({"m": WithExtra(b"x")}), {"m": plain})
    assert "unexpected 'm._extra_state'" in line


# renames


def test_a_subtree_is_loaded_from_under_another_name(memory):
    saved = nn.ModuleDict({"enc": nn.Linear(2, 2), "out": nn.Linear(2, 1)})
    target = nn.ModuleDict({"encoder": nn.Linear(2, 2), "out": nn.Linear(2, 1)})
    stored = memory.save({"model": saved})
    assert memory.problems(stored, {"model": target})
    options = RestoreOptions(rename={"model.encoder": "model.enc"})
    restore = memory.load(stored, {"model": target}, options=options)
    assert torch.equal(saved["enc"].weight, target["encoder"].weight)
    assert any("'model.encoder': loaded from 'model.enc'" in note for note in restore.notes)


def test_a_whole_level_is_renamed_or_added(memory):
    saved, target = nn.Linear(2, 2), nn.Linear(2, 2)
    memory.load(memory.save({"net": saved}), {"model": target}, options=RestoreOptions(rename={"model": "net"}))
    assert torch.equal(saved.weight, target.weight)
    target = nn.Linear(2, 2)
    options = RestoreOptions(rename={"model.weight": "weight", "model.bias": "bias"})
    memory.load(memory.save(saved), {"model": target}, options=options)
    assert torch.equal(saved.weight, target.weight)


def test_a_renamed_name_that_is_not_stored_is_missing(memory):
    stored = memory.save({"m": nn.Linear(1, 1)})
    found = memory.problems(stored, {"m": nn.Linear(1, 1)}, rename={"m.weight": "m.kernel"})
    assert [line.split(":")[0] for line in found] == ["missing 'm.weight'", "unexpected 'm.weight'"]


def test_a_renamed_name_that_two_places_share_is_a_problem(memory):
    stored = memory.save({"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}, "a.0": torch.tensor([3.0])})
    found = memory.problems(stored, {"x": torch.zeros(1)}, rename={"x": "a.b"}, ignore=("a.0", "a"))
    assert any("2 places" in line for line in found)


# subclasses


def test_a_subclass_of_several_tensors_is_filled(memory):
    saved = {"w": TwoTensor(torch.ones(2), torch.full((2,), 2.0))}
    target = {"w": TwoTensor(torch.zeros(2), torch.zeros(2))}
    memory.load(memory.save(saved), target)
    assert target["w"].a.tolist() == [1.0, 1.0]
    assert target["w"].b.tolist() == [2.0, 2.0]
    (line,) = memory.problems(memory.save(saved), {"w": torch.zeros(2)})
    assert "'w'" in line
    (line,) = memory.problems(memory.save({"w": torch.zeros(2)}), target)
    assert "'w'" in line
