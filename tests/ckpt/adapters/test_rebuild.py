from __future__ import annotations

import collections
import io

import numpy as np
import pytest
import torch
from torch import nn

from vescale_ckpt.adapters.draft import Draft, Ranks
from vescale_ckpt.adapters.options import RestoreOptions, Selector
from vescale_ckpt.adapters.rebuild import NOTHING, Rebuilder, has_arrays, is_group_params, is_live
from vescale_ckpt.state.tree import DictNode, ListNode, TensorNode, ValueNode


def rebuilt(memory, state, template=NOTHING):
    """Return what is made of a stored state with a template, and the draft."""
    stored = memory.save(state)
    draft = Draft(stored.tree, stored.tensors, Selector(RestoreOptions()), ranks=Ranks(rank=0), same_content=None)
    maker = Rebuilder(draft).make(template, stored.tree, (), ())
    draft.close()
    for leaf in draft.leaves:
        record = stored.tensors[leaf.path]
        full = stored.full[leaf.path if record.alias_of is None else draft.root(leaf.path)]
        for piece in leaf.pieces:
            piece.view.copy_(full[piece.box.slices or ...])
    return maker(), draft


def test_the_stored_tree_says_what_is_made_and_not_the_template(memory):
    found, draft = rebuilt(memory, {"a": [1, 2], "b": torch.ones(2)}, {"a": 5, "c": 6})
    assert found["a"] == [1, 2]
    assert found["b"].tolist() == [1.0, 1.0]
    assert found.keys() == {"a", "b"}
    assert draft.taken.flags.all()


def test_a_template_lends_its_memory_where_it_fits(memory):
    fits, shape, dtype, array = torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.float64), np.zeros(2)
    state = {"fits": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2), "array": np.ones(2)}
    found, draft = rebuilt(memory, state, {"fits": fits, "shape": shape, "dtype": dtype, "array": array})
    assert found["fits"] is fits
    assert found["array"] is array
    assert found["shape"] is not shape
    assert found["dtype"].dtype == torch.float32
    assert fits.tolist() == array.tolist() == [1.0, 1.0]
    assert draft.problems == []


def test_a_template_lends_the_class_of_its_dicts(memory):
    template = {"d": collections.defaultdict(list), "c": collections.Counter(), "o": collections.OrderedDict()}
    found, _ = rebuilt(memory, {"d": {"x": 1}, "c": {"a": 2}, "o": {"z": 3}}, template)
    assert {key: type(value) for key, value in found.items()} == {key: type(v) for key, v in template.items()}
    assert found["d"]["new"] == []
    assert template["d"] == {}


def test_a_function_in_the_template_stays_where_nothing_is_stored(memory):
    found, _ = rebuilt(memory, {"f": None, "g": None, "h": 1}, {"f": len, "g": 3, "h": len})
    assert found == {"f": len, "g": None, "h": 1}


def test_a_tensor_of_the_template_that_is_not_stored_is_missing(memory):
    _, draft = rebuilt(memory, {"a": {"x": 1}}, {"a": {"x": 1, "lost": torch.zeros(1)}})
    assert "missing 'a.lost'" in draft.problems[0]


def test_bytes_are_made_after_the_fill(memory):
    found, _ = rebuilt(memory, {"s": io.BytesIO(b"ab"), "b": b"x" * 5000, "e": io.BytesIO()})
    assert found["s"].getvalue() == b"ab"
    assert found["b"] == b"x" * 5000
    assert found["e"].getvalue() == b""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (nn.Linear(1, 1), True),
        (torch.amp.GradScaler("cpu"), True),
        (torch.optim.SGD([torch.zeros(1)]), True),
        ({}, False),
        (torch.zeros(1), False),
    ],
)
def test_what_takes_its_state_by_itself(value, expected):
    assert is_live(value) is expected


def test_questions_about_nodes_and_paths():
    assert has_arrays(ListNode((DictNode((("a", TensorNode()),)),)))
    assert not has_arrays(ListNode((ValueNode(1),)))
    assert is_group_params(("o", "param_groups", 0, "params"))
    assert not is_group_params(("params",))
    assert not is_group_params(("o", "param_groups", 0, "lr"))
