from __future__ import annotations

import collections
import io
import typing

import numpy as np
import pytest
import torch

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.build import build_tree, restore_tree
from vescale_ckpt.state.tree import (
    MAX_DEPTH,
    DictKind,
    DictNode,
    ListNode,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    tensor_paths,
)


class Arrays:
    """Takes what is an array out of a state, and puts it back."""

    def __init__(self) -> None:
        self.by_path = {}

    def leaf(self, path, obj):
        if isinstance(obj, torch.Tensor | np.ndarray | io.BytesIO):
            self.by_path[path] = obj
            return TensorNode()
        return None


def there_and_back(state):
    arrays = Arrays()
    tree = build_tree(state, arrays.leaf)
    assert tensor_paths(tree) == list(arrays.by_path)
    return restore_tree(tree, arrays.by_path.__getitem__, lambda path, node: (path, node))


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or a == b


T = torch.arange(3.0)
STATES = {
    "nested": {"a": [T, (T + 1, {"k": T + 2})], "none": None, "int": 3, "float": 0.1, "str": "x", "bool": True},
    "dotted": {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}},
    "dotted list": {"a.0": torch.tensor([1.0]), "a": [torch.tensor([2.0])]},
    "int and str keys": {"s": {0: T, "0": T + 1, -1: 2}},
    "optimizer": {
        "state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.ones(2)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}, {"lr": 5e-4, "params": []}],
    },
    "opaque": {"w": torch.ones(2, 2), "w._extra_state": io.BytesIO(b"x"), "v._extra_state": torch.empty(0), "b": b""},
    "ordered": collections.OrderedDict(b=1, a=collections.OrderedDict()),
    "milestones": {"milestones": collections.Counter({30: 1, 80: 2}), "gamma": 0.1},
    "empty": {"d": {}, "l": [], "t": (), "s": ""},
    "rng": ("MT19937", np.arange(4, dtype=np.uint32), 624, 0, 0.0),
    "bare tensor": T,
    "bare value": 5,
    "foreign": [torch.bfloat16, torch.Size((2,)), np.float32(1)],
}


@pytest.mark.parametrize("state", STATES.values(), ids=list(STATES))
def test_types_order_and_positions_come_back(state):
    assert same(there_and_back(state), state)


def test_the_tree_of_a_state():
    tree = build_tree({"a": [1, ()], 2: collections.Counter(x=1)}, lambda _path, _obj: None)
    assert tree == DictNode(
        (
            ("a", ListNode((ValueNode(1), TupleNode(())))),
            (2, DictNode((("x", ValueNode(1)),), kind=DictKind.COUNTER)),
        )
    )


def test_the_leaf_function_is_asked_first_about_everything():
    asked = []

    def leaf(path, obj):
        asked.append(path)
        return PerRankNode(((0, ValueNode(obj["x"])),)) if isinstance(obj, dict) and "x" in obj else None

    tree = build_tree({"rng": {"x": 7}, "l": [1]}, leaf, ("top",))
    assert tree == DictNode((("rng", PerRankNode(((0, ValueNode(7)),))), ("l", ListNode((ValueNode(1),)))))
    assert asked == [("top",), ("top", "rng"), ("top", "l"), ("top", "l", 0)]
    assert restore_tree(tree, lambda path: path, lambda path, node: (path, len(node.items))) == {
        "rng": (("rng",), 1),
        "l": [1],
    }


def test_a_defaultdict_comes_back_as_a_dict_and_the_caller_is_told():
    notes = []
    state = {"d": collections.defaultdict(list, b=1, a=2)}
    tree = build_tree(state, lambda _path, _obj: None, notes=notes)
    assert notes == ["'d' is a defaultdict and will come back as a dict"]
    back = restore_tree(tree, lambda path: path, lambda _path, node: node)
    assert type(back["d"]) is dict
    assert list(back["d"].items()) == [("b", 1), ("a", 2)]
    assert state["d"].default_factory is list


class Pair(typing.NamedTuple):
    a: int
    b: int


class MyDict(dict):
    pass


class MyList(list):
    pass


def test_all_that_cannot_be_stored_is_listed_in_one_error():
    state = {
        "ok": 1,
        "set": {1},
        "deep": [0, {"pair": Pair(1, 2), True: 1, 1.5: 2}],
        "dict": MyDict(a=1),
        "list": MyList([1]),
        "\ud800": 3,
    }
    with pytest.raises(InvalidInputError) as caught:
        build_tree(state, lambda _path, _obj: None)
    problems = caught.value.context["problems"]
    assert len(problems) == 7
    for place, says in [
        ("'set'", "sorted list"),
        ("'deep.1.pair'", "_asdict()"),
        ("True of 'deep.1'", "bool"),
        ("1.5 of 'deep.1'", "float"),
        ("'dict'", "dict() of it"),
        ("'list'", "list() of it"),
        ("the top of the state", "surrogate"),
    ]:
        assert any(place in problem and says in problem for problem in problems), (place, problems)
    assert all(problem in caught.value.message for problem in problems)


def test_circles_are_refused_and_repeated_objects_are_not():
    inner = {"x": 1}
    assert build_tree([inner, inner], lambda _path, _obj: None) == ListNode((DictNode((("x", ValueNode(1)),)),) * 2)
    inner["self"] = [inner]
    with pytest.raises(InvalidInputError, match=r"'a\.self\.0' is 'a', which holds it"):
        build_tree({"a": inner}, lambda _path, _obj: None)


def test_depth_is_bounded():
    def nested(levels):
        state = 1
        for _ in range(levels):
            state = [state]
        return state

    build_tree(nested(MAX_DEPTH), lambda _path, _obj: None)
    with pytest.raises(InvalidInputError, match=f"nested more than {MAX_DEPTH} deep"):
        build_tree(nested(MAX_DEPTH + 1), lambda _path, _obj: None)
    with pytest.raises(InvalidInputError, match=f"nested more than {MAX_DEPTH} deep"):
        build_tree(nested(10_000), lambda _path, _obj: None)
