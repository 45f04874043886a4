from __future__ import annotations

import pytest
import torch

from vescale_ckpt.adapters.draft import Draft, Ranks, missing
from vescale_ckpt.adapters.options import RestoreOptions, Selector
from vescale_ckpt.state.tree import TensorNode


def draft(stored, *, same_content=None, **options):
    return Draft(
        stored.tree, stored.tensors, Selector(RestoreOptions(**options)), ranks=Ranks(rank=0), same_content=same_content
    )


@pytest.fixture
def stored(memory):
    x = torch.arange(3.0)
    return memory.save({"x": x, "tie": x, "same": x.clone(), "a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})


def new(shape, dtype):
    return torch.empty(shape, dtype=dtype)


def test_roots_are_seen_through_aliases(stored):
    plan = draft(stored)
    assert plan.root(("tie",)) == ("x",)
    assert plan.root(("x",)) == ("x",)
    assert plan.find_record(("nothing",)) is None
    assert plan.record(("x",)).shape == (3,)


def test_a_fill_is_a_leaf_under_the_stored_path(stored):
    plan, target = draft(stored), torch.zeros(3)
    plan.fill(target, ("x",), ("mine",))
    (leaf,) = plan.leaves
    assert leaf.path == ("x",)
    assert leaf.pieces[0].view.data_ptr() == target.data_ptr()
    assert plan.taken.flags.sum() == 1
    assert plan.problems == []


def test_one_memory_is_filled_once(stored):
    plan, target = draft(stored), torch.zeros(3)
    plan.fill(target, ("x",), ("one",))
    plan.fill(target, ("tie",), ("two",))
    assert [bool(leaf.pieces) for leaf in plan.leaves] == [True, False]
    assert plan.leaves[1].alias_of == ("x",)
    plan.fill(target, ("same",), ("three",))
    assert "'three'" in plan.problems[0]
    assert "'one'" in plan.problems[0]


def test_one_memory_may_take_two_tensors_that_are_equal(stored):
    plan, target = draft(stored, same_content=lambda *_: True), torch.zeros(3)
    plan.fill(target, ("x",), ("one",))
    plan.fill(target, ("same",), ("two",))
    assert plan.problems == []


def test_new_memory_is_shared_by_aliases_that_are_made_alike(stored):
    plan = draft(stored)
    one = plan.allocate(("x",), ("x",), key="cpu", make=new)
    assert plan.allocate(("tie",), ("tie",), key="cpu", make=new) is one
    assert plan.allocate(("tie",), ("other",), key="else", make=new) is not one
    assert plan.allocate(("same",), ("same",), key="cpu", make=new) is not one
    assert plan.allocate(("x",), ("z",), key="cast", make=new, dtype=torch.float64).dtype == torch.float64


def test_what_is_absent_is_missing_unless_it_is_tied_to_what_is_filled(stored):
    plan, target = draft(stored), torch.zeros(3)
    plan.absent(target, ("twin",))
    plan.absent(torch.zeros(3), ("lost",))
    plan.absent(torch.zeros(3, device="meta"), ("meta",))
    plan.fill(target, ("x",), ("x",))
    plan.close()
    assert [line.split(":")[0] for line in plan.problems] == ["missing 'lost'", "missing 'meta'"]
    assert any("'twin' is not stored" in note and "'x'" in note for note in plan.notes)
    assert missing("lost", "a tensor") in plan.problems


def test_places_are_found_by_key_or_by_another_name(stored):
    below = dict(stored.tree.items)
    assert draft(stored).locate(below, "x", (), ("x",)) == (("x",), TensorNode())
    assert draft(stored).locate(below, "y", (), ("y",)) is None
    assert draft(stored, rename={"y": "tie"}).locate(below, "y", (), ("y",)) == (("tie",), TensorNode())
    plan = draft(stored, rename={"y": "a.b"})
    plan.locate(below, "y", (), ("y",))
    assert "2 places" in plan.problems[0]
