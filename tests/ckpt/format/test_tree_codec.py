from __future__ import annotations

import json
import struct
import sys

import pytest

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.format.tree_codec import decode_tree, encode_tree, tree_digest, tree_from_json, tree_to_json
from vescale_ckpt.state.tree import (
    MAX_DEPTH,
    DictKind,
    DictNode,
    Foreign,
    ListNode,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
)
from vescale_storage.digest import digest

T = TensorNode()


def nan(bits: int) -> float:
    return struct.unpack(">d", bits.to_bytes(8, "big"))[0]


# The right-hand side is the format: it is never to change.
PAIRS = [
    (T, '["tensor"]'),
    (ValueNode(None), "null"),
    (ValueNode(True), "true"),
    (ValueNode(False), "false"),
    (ValueNode(0), "0"),
    (ValueNode(-(2**53) + 1), "-9007199254740991"),
    (ValueNode(2**53), '["int","20000000000000"]'),
    (ValueNode(-(2**70)), '["int","-400000000000000000"]'),
    (ValueNode(""), '""'),
    (ValueNode('é\n"\\\U0001f600\x7f'), '"é\\n\\"\\\\\U0001f600\x7f"'),
    (ValueNode("\ud83d\ude00"), '["str","eda0bdedb880"]'),
    (ValueNode(0.1), '["float","3fb999999999999a"]'),
    (ValueNode(-0.0), '["float","8000000000000000"]'),
    (ValueNode(float("inf")), '["float","7ff0000000000000"]'),
    (ValueNode(nan(0x7FF8000000000001)), '["float","7ff8000000000001"]'),
    (ValueNode(nan(0xFFF0000000000001)), '["float","fff0000000000001"]'),
    (ValueNode(complex(-0.0, 1)), '["complex","80000000000000003ff0000000000000"]'),
    (ValueNode(b""), '["bytes",""]'),
    (ValueNode(b"\0\xff"), '["bytes","AP8="]'),
    (ValueNode(Foreign("torch.dtype", "bfloat16")), '["torch.dtype","bfloat16"]'),
    (ListNode(()), '["list",[]]'),
    (TupleNode((T, ValueNode(1))), '["tuple",[["tensor"],1]]'),
    (DictNode(()), '["dict",[],[]]'),
    (DictNode((("b", T), (0, ValueNode("0")), ("0", ValueNode(0)))), '["dict",["b",0,"0"],[["tensor"],"0",0]]'),
    (DictNode((("a", T),), union=True), '["dict",["a"],[["tensor"]],["union"]]'),
    (DictNode((), kind=DictKind.ORDERED), '["dict",[],[],["ordered"]]'),
    (DictNode((), union=True, kind=DictKind.COUNTER), '["dict",[],[],["counter","union"]]'),
    (PerRankNode(((0, T), (7, ListNode(())))), '["per_rank",[0,7],[["tensor"],["list",[]]]]'),
]


@pytest.mark.parametrize(("tree", "text"), PAIRS, ids=lambda x: x if isinstance(x, str) else "")
def test_the_bytes_of_every_node(tree, text):
    assert encode_tree(tree).decode() == text
    assert decode_tree(text.encode()) == tree
    assert tree_from_json(tree_to_json(tree)) == tree


def test_different_trees_have_different_bytes():
    assert len({encode_tree(tree) for tree, _ in PAIRS}) == len(PAIRS)
    assert len({tree_digest(tree) for tree, _ in PAIRS}) == len(PAIRS)


def test_the_digest_is_that_of_the_bytes():
    assert tree_digest(T) == digest(b'["tensor"]')


def nested(levels):
    tree = T
    for _ in range(levels):
        tree = DictNode((("a", tree),))
    return tree


def test_depth_is_bounded_on_both_sides():
    deepest = nested(MAX_DEPTH)
    assert decode_tree(encode_tree(deepest)) == deepest
    for levels in (MAX_DEPTH + 1, 5000):
        with pytest.raises(InvalidInputError, match="flatten it"):
            encode_tree(nested(levels))
    text = '["tensor"]'
    for _ in range(MAX_DEPTH + 1):
        text = f'["dict",["a"],[{text}]]'
    with pytest.raises(FormatError, match=f"nested over {MAX_DEPTH}"):
        decode_tree(text.encode())


def test_bombs_are_format_errors():
    for text in ('["list",[' * 50_000, '["list",[' * 300 + "1" + "]]" * 300, "[" * 100_000 + "]" * 100_000):
        with pytest.raises(FormatError):
            decode_tree(text.encode())


def test_a_deep_tree_needs_little_of_the_callers_stack():
    data = encode_tree(nested(MAX_DEPTH))

    def dive(levels):
        return decode_tree(data) if levels == 0 else dive(levels - 1)

    depth, frame = 0, sys._getframe()
    while frame:
        depth, frame = depth + 1, frame.f_back
    assert dive(sys.getrecursionlimit() - depth - 450) == nested(MAX_DEPTH)


@pytest.mark.parametrize(
    "doc",
    [
        {},
        {"a": 1},
        [],
        [[]],
        [1],
        [None],
        [["tensor"]],
        ["tensor", 1],
        ["nothing"],
        ["nothing", 1],
        ["nothing", "x"],
        ["torch.dtype"],
        ["torch.dtype", 1],
        ["torch.dtype", "a", "b"],
        ["Torch.dtype", "a"],
        ["torch.", "a"],
        ["a" * 200 + ".b", "x"],
        ["list"],
        ["list", 1],
        ["list", [], []],
        ["list", {}],
        ["tuple", None],
        ["dict"],
        ["dict", []],
        ["dict", ["a"], []],
        ["dict", [], [1]],
        ["dict", ["a", "a"], [1, 2]],
        ["dict", [1, 1], [1, 2]],
        ["dict", [True], [1]],
        ["dict", [None], [1]],
        ["dict", [["a"]], [1]],
        ["dict", [{}], [1]],
        ["dict", [2**63], [1]],
        ["dict", [-(2**63) - 1], [1]],
        ["dict", {"a": 1}, [1]],
        ["dict", "a", [1]],
        ["dict", [], [], []],
        ["dict", [], [], ["dict"]],
        ["dict", [], [], ["union", "ordered"]],
        ["dict", [], [], ["union", "union"]],
        ["dict", [], [], ["new"]],
        ["dict", [], [], "union"],
        ["dict", [], [], [["union"]]],
        ["dict", [], [], ["union"], 1],
        ["per_rank", [1, 0], [1, 2]],
        ["per_rank", [0, 0], [1, 2]],
        ["per_rank", [-1], [1]],
        ["per_rank", [2**31], [1]],
        ["per_rank", ["0"], [1]],
        ["per_rank", [True], [1]],
        ["per_rank", [], [], ["union"]],
        ["float"],
        ["float", 1],
        ["float", ""],
        ["float", "3fb999999999999"],
        ["float", "3FB999999999999A"],
        ["float", " 3fb999999999999a"],
        ["float", "3fb999999999999a", 1],
        ["float", "zzzzzzzzzzzzzzzz"],
        ["complex", "3fb999999999999a"],
        ["int", "1"],
        ["int", "-1fffffffffffff"],
        ["int", "020000000000000"],
        ["int", "0x20000000000000"],
        ["int", "2000_0000000000"],
        ["int", "20000000000000 "],
        ["int", "-"],
        ["int", ""],
        ["int", 2**60],
        ["str", "61"],
        ["str", ""],
        ["str", "ff"],
        ["str", "EDA0BD"],
        ["bytes", "A"],
        ["bytes", "AP8"],
        ["bytes", "AP9="],
        ["bytes", "AP8=\n"],
        ["bytes", "é"],
        2**53,
        -(2**53),
    ],
    ids=lambda doc: str(doc)[:40],
)
def test_every_other_json_is_a_format_error_that_names_the_place(doc):
    text = json.dumps(["dict", ["k"], [["list", [None, doc]]]])
    with pytest.raises(FormatError, match=r"'k\.1'"):
        decode_tree(text.encode())


@pytest.mark.parametrize("text", ["1.0", "1e5", "NaN", '{"a":1}', "", "[", '"\\ud800"', "1 2", "9" * 5000])
def test_what_is_no_json_of_a_tree_is_a_format_error(text):
    with pytest.raises(FormatError):
        decode_tree(text.encode())


def test_values_of_newer_libraries_are_kept_though_not_known():
    tree = decode_tree(b'["jax.numpy.dtype","float1"]')
    assert tree == ValueNode(Foreign("jax.numpy.dtype", "float1"))
    assert encode_tree(tree) == b'["jax.numpy.dtype","float1"]'


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (DictNode((("a", T), ("a", T))), "a key twice"),
        (DictNode(((True, T),)), "bool"),
        (DictNode(((2**63, T),)), "64 bits"),
        (DictNode((("\ud800", T),)), "surrogate"),
        (PerRankNode(((1, T), (0, T))), "ascending"),
        (PerRankNode(((-1, T),)), "ascending"),
        (PerRankNode(((0, T), (0, T))), "a key twice"),
        (ValueNode([1]), "to_value"),
        (ValueNode(bytearray(b"x")), "to_value"),
        (ValueNode(Foreign("nodot", "x")), "to_value"),
        (ValueNode(Foreign("a.b", "\ud800")), "to_value"),
    ],
)
def test_trees_that_no_reader_would_take_are_refused(tree, says):
    with pytest.raises(InvalidInputError, match=says) as caught:
        encode_tree(DictNode((("top", tree),)))
    assert "'top'" in caught.value.message


def test_a_subclass_of_a_plain_type_is_refused():
    class MyInt(int):
        pass

    with pytest.raises(InvalidInputError, match="MyInt"):
        encode_tree(ValueNode(MyInt(1)))
