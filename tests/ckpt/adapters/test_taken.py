from __future__ import annotations

import numpy as np
import pytest

from vescale_ckpt.adapters.options import RestoreOptions, Selector
from vescale_ckpt.adapters.taken import Taken, unexpected
from vescale_ckpt.state.tree import DictNode, ListNode, PerRankNode, TensorNode, ValueNode

T, V = TensorNode(), ValueNode(1)
TREE = DictNode((
    ("model", DictNode((("a", T), ("b", T)), union=True)),
    ("a.b", T),
    ("extra", ListNode((V, DictNode(()), V))),
    ("rng", PerRankNode(((0, T), (1, T)))),
))  # fmt: skip
ALL = [("model", "a"), ("model", "b"), ("a.b",), ("extra", 0), ("extra", 2), ("rng", 0), ("rng", 1)]


def lines(taken, **options):
    flags = Taken(TREE)
    for path in taken:
        flags.add(path)
    return unexpected(TREE, flags.flags, Selector(RestoreOptions(**options)))


def test_there_is_a_flag_for_every_leaf_in_the_order_of_the_tree():
    taken = Taken(TREE)
    assert taken.flags.shape == (len(ALL),)
    for index, path in enumerate(ALL):
        taken.add(path)
        assert taken.flags.sum() == index + 1
        assert taken.flags[index]


def test_a_subtree_is_taken_whole():
    taken = Taken(TREE)
    taken.add_below(("rng",), TREE.items[3][1])
    taken.add_below(("a.b",), T)
    assert taken.flags.tolist() == [False, False, True, False, False, True, True]


def test_nothing_is_unexpected_when_all_is_taken():
    assert lines(ALL) == ()


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ([("model", "a")], ["'model.a': the snapshot has a tensor"]),
        ([("model", "a"), ("model", "b")], ["'model': the snapshot has 2 tensors"]),
        ([("extra", 0)], ["'extra.0': the snapshot has a value"]),
        ([("extra", 0), ("extra", 2), ("rng", 1)], ["'extra': the snapshot has 2 values", "'rng.1'"]),
        (ALL, ["'model': the snapshot has 2 tensors", "'a.b'", "'extra'", "'rng': the snapshot has 2 tensors"]),
    ],
)
def test_what_is_left_is_told_once_as_far_up_as_it_is_whole(left, expected):
    found = lines([path for path in ALL if path not in left])
    assert all(start in line for start, line in zip(expected, found, strict=True))
    assert all("ignore=" in line for line in found)


def test_options_allow_it():
    assert lines([], ignore=("model", "a.b", "extra", "rng")) == ()
    assert lines([("model", "a"), ("model", "b")], only=("model",)) == ()
    assert len(lines([], only=("model",))) == 1


def test_an_optimizers_state_has_a_way_out_of_its_own():
    state = DictNode((("w", T),))
    tree = DictNode((("optimizer", DictNode((("state", state), ("param_groups", ListNode((V,)))))),))
    (line,) = unexpected(tree, np.array([False, True]), Selector(RestoreOptions()))
    assert "pass the optimizer itself" in line
    assert "ignore=('optimizer.state',)" in line
