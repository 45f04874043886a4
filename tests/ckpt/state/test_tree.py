from __future__ import annotations

import struct

import pytest

from vescale_ckpt.errors import NotFoundError
from vescale_ckpt.state.tree import (
    DictKind,
    DictNode,
    Foreign,
    ListNode,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    children,
    describe,
    fqn,
    get,
    same_value,
    shorten,
    tensor_paths,
    walk,
)

T = TensorNode()


def nan(bits: int) -> float:
    return struct.unpack(">d", bits.to_bytes(8, "big"))[0]


TREE = DictNode(
    (
        ("a.b", T),
        ("a", DictNode((("b", ValueNode(1)), (0, ListNode((T, TupleNode((ValueNode(None), T)))))))),
        ("rng", PerRankNode(((3, DictNode((("s", T),))),))),
    )
)


def test_walk_goes_in_order_with_parents_first():
    assert [path for path, _ in walk(TREE)] == [
        (),
        ("a.b",),
        ("a",),
        ("a", "b"),
        ("a", 0),
        ("a", 0, 0),
        ("a", 0, 1),
        ("a", 0, 1, 0),
        ("a", 0, 1, 1),
        ("rng",),
        ("rng", 3),
        ("rng", 3, "s"),
    ]
    assert [path for path, _ in walk(T, ("x",))] == [("x",)]


def test_tensor_paths_are_those_that_walk_finds():
    assert tensor_paths(TREE) == [path for path, node in walk(TREE) if node == T]
    assert tensor_paths(T) == [()]
    assert tensor_paths(ValueNode(1)) == []


def test_walk_of_a_deep_tree_needs_no_stack():
    node = T
    for _ in range(5000):
        node = ListNode((node,))
    assert sum(1 for _ in walk(node)) == 5001
    assert tensor_paths(node) == [(0,) * 5000]


def test_children_of_leaves_are_none():
    assert list(children(T)) == []
    assert list(children(ValueNode("x"))) == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0, False),
        (0.0, -0.0),
        (complex(0, 0.0), complex(0, -0.0)),
        (complex(0.0, 0), complex(-0.0, 0)),
        (nan(0x7FF8000000000000), nan(0x7FF8000000000001)),
        ("a", b"a"),
        ("1", 1),
        (None, False),
        (Foreign("torch.dtype", "float32"), "float32"),
        (Foreign("torch.dtype", "float32"), Foreign("torch.layout", "float32")),
    ],
)
def test_values_that_differ_in_type_or_bits_are_different_nodes(a, b):
    assert not same_value(a, b)
    assert ValueNode(a) != ValueNode(b)
    assert len({ValueNode(a), ValueNode(b)}) == 2
    assert DictNode((("x", ValueNode(a)),)) != DictNode((("x", ValueNode(b)),))


@pytest.mark.parametrize("value", [None, True, 2**300, -0.0, nan(0x7FF8000000000001), 1j, "é", b"\0"])
def test_equal_values_are_equal_nodes(value):
    twin = ValueNode(struct.unpack("<d", struct.pack("<d", value))[0] if isinstance(value, float) else value)
    assert ValueNode(value) == twin
    assert hash(ValueNode(value)) == hash(twin)
    assert ListNode((ValueNode(value),)) == ListNode((twin,))


def test_nodes_of_different_kinds_are_different():
    assert ListNode(()) != TupleNode(())
    assert DictNode(()) != DictNode((), union=True)
    assert DictNode(()) != DictNode((), kind=DictKind.ORDERED)
    assert ValueNode(None) != T
    assert ValueNode(None) != None  # noqa: E711 - the operator is what is tested


def test_get_tells_str_and_int_keys_apart():
    assert get(TREE, ("a", 0, 1, 1)) is T
    assert get(TREE, ()) is TREE
    with pytest.raises(NotFoundError, match=r"'a' is a dict of 2 keys without '0'") as caught:
        get(DictNode((("a", DictNode(((0, T), (1, T)))),)), ("a", "0"))
    assert caught.value.context["fqn"] == "a.0"
    with pytest.raises(NotFoundError, match="the value 1"):
        get(TREE, ("a", "b", "c"))


def test_dotted_names_may_collide_and_paths_do_not():
    tree = DictNode((("a.b", T), ("a", DictNode((("b", T),)))))
    first, second = tensor_paths(tree)
    assert first != second
    assert fqn(first) == fqn(second) == "a.b"


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (DictNode((("a", T),)), "a dict of 1 key"),
        (ListNode(()), "a list of 0"),
        (TupleNode((T,)), "a tuple of 1"),
        (PerRankNode(()), "a value per rank"),
        (T, "a tensor"),
        (ValueNode("x"), "the value 'x'"),
    ],
)
def test_describe(node, text):
    assert describe(node).startswith(text)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10_000,
        b"x" * 10_000,
        10**10_000,
        -(10**10_000),
        Foreign("numpy.str_", "y" * 10_000),
        nan(0x7FF8000000000001),
    ],
    ids=["str", "bytes", "int", "negative", "foreign", "nan"],
)
def test_shorten_is_short_whatever_it_is_given(value):
    assert len(shorten(value)) < 120


def test_shorten_shows_sign_size_and_payload():
    assert shorten(-(2**4000)).startswith("-0x8")
    assert "4001 bits" in shorten(2**4000)
    assert "(10000 characters)" in shorten("x" * 10_000)
    assert shorten(nan(0x7FF8000000000001)) == "nan(7ff8000000000001)"
    assert shorten(-0.0) == "-0.0"
