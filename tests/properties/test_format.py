"""Whatever is written comes back the same, and whatever else is read gives an error of the format and no other."""

from __future__ import annotations

import contextlib
import copy
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt.errors import FormatError, MismatchError
from vescale_ckpt.format.document import Section, decode_document, encode_document
from vescale_ckpt.format.fragment import MAGIC as FRAGMENT_MAGIC
from vescale_ckpt.format.fragment import Fragment, FragmentChunks, decode_fragment, encode_fragment
from vescale_ckpt.format.kinds import FragmentKind, Kind
from vescale_ckpt.format.manifest import MAGIC, decode_manifest, encode_manifest
from vescale_ckpt.format.records import FORMAT_VERSION, ChunkTable, Manifest, PackRecord, TensorRecord
from vescale_ckpt.format.tree_codec import decode_tree, encode_tree, tree_digest
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tiles import TileGrid
from vescale_ckpt.state.build import build_tree, restore_tree
from vescale_ckpt.state.merge import fill_per_rank, merge_trees, split_per_rank
from vescale_ckpt.state.tree import (
    DictKind,
    DictNode,
    Foreign,
    ListNode,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    same_value,
    tensor_paths,
    walk,
)

TENSOR = TensorNode()
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # lone surrogates too
KEYS = st.one_of(st.text(max_size=6), st.integers(-(2**63), 2**63 - 1))
FLOATS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**2000), 2**2000),
    FLOATS,
    st.sampled_from([0.0, -0.0, float("inf"), float("nan")]),
    st.builds(complex, FLOATS, FLOATS),
    ANY_TEXT,
    st.binary(max_size=20),
)
FOREIGN = st.builds(Foreign, st.from_regex(r"\A(torch|numpy)\.[a-zA-Z0-9_]{1,12}\Z"), st.text(max_size=8))
LEAVES = st.one_of(st.just(TENSOR), VALUES.map(ValueNode), FOREIGN.map(ValueNode))


def dicts(children):
    items = st.dictionaries(KEYS, children, max_size=4).map(lambda d: tuple(d.items()))
    return st.builds(DictNode, items, st.booleans(), st.sampled_from(DictKind))


def containers(children):
    per_rank = st.dictionaries(st.integers(0, 9), children, max_size=3).map(lambda d: tuple(sorted(d.items())))
    return st.one_of(
        dicts(children),
        st.lists(children, max_size=4).map(lambda items: ListNode(tuple(items))),
        st.lists(children, max_size=4).map(lambda items: TupleNode(tuple(items))),
        per_rank.map(PerRankNode),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=20)


@given(TREES)
@settings(deadline=None)
def test_trees_come_back_to_the_bit(tree):
    data = encode_tree(tree)
    back = decode_tree(data)
    assert back == tree
    assert encode_tree(back) == data
    for (_, a), (_, b) in zip(walk(tree), walk(back), strict=True):
        if isinstance(a, ValueNode):
            assert same_value(a.value, b.value)


@given(TREES, TREES)
@settings(deadline=None)
def test_bytes_are_equal_exactly_if_trees_are(a, b):
    assert (encode_tree(a) == encode_tree(b)) == (a == b)
    assert (tree_digest(a) == tree_digest(b)) == (a == b)


STATES = st.recursive(
    VALUES,
    lambda children: st.one_of(
        st.dictionaries(KEYS, children, max_size=4),
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
    ),
    max_leaves=20,
)


def same_state(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same_state, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return same_value(a, b)


@given(STATES)
@settings(deadline=None)
def test_states_come_back_through_bytes(state):
    tree = decode_tree(encode_tree(build_tree(state, lambda _path, _obj: None)))
    assert same_state(restore_tree(tree, lambda path: path, lambda path, _node: path), state)


@given(TREES, st.integers(1, 4))
@settings(deadline=None)
def test_merging_equal_trees_changes_nothing(tree, num_ranks):
    assert merge_trees([(rank, copy.deepcopy(tree)) for rank in range(num_ranks)]) == tree


@given(TREES, TREES)
@settings(deadline=None)
def test_merging_agrees_or_tells(a, b):
    try:
        merged = merge_trees([(0, a), (1, b)])
    except MismatchError as error:
        assert error.problems  # noqa: PT017
        assert a != b
    else:
        assert set(tensor_paths(merged)) == set(tensor_paths(a)) | set(tensor_paths(b))


@given(TREES, st.integers(0, 3))
@settings(deadline=None)
def test_split_and_fill_are_inverse(tree, rank):
    def own(node):
        """Return the tree as one rank has it: one entry at most in a per-rank node, none inside another."""
        match node:
            case PerRankNode():
                return PerRankNode(((rank, TENSOR),)) if node.items else node
            case DictNode():
                return DictNode(tuple((key, own(child)) for key, child in node.items), node.union, node.kind)
            case ListNode() | TupleNode():
                return type(node)(tuple(own(child) for child in node.items))
        return node

    mine = own(tree)
    skeleton, entries = split_per_rank(mine)
    assert fill_per_rank(skeleton, [(rank, entries)]) == mine


# Manifests ------------------------------------------------------------------------------------------------------------


@st.composite
def manifests(draw):
    tree = draw(dicts(st.recursive(LEAVES, containers, max_leaves=8)))
    tensors, columns = [], {"tile": [], "partial": []}
    first = [0]
    for path in draw(st.permutations(tensor_paths(tree))):
        same = [i for i, t in enumerate(tensors) if t.alias_of is None]
        if same and draw(st.integers(0, 4)) == 0:
            origin = draw(st.sampled_from(same))
            tensors.append(TensorRecord(path, tensors[origin].dtype, *_shapes(tensors[origin]), alias_of=origin))
            first.append(first[-1])
            continue
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        tile = tuple(draw(st.integers(1, max(n, 1))) for n in shape)
        dtype, kind = draw(st.sampled_from([("float32", "tensor"), ("bfloat16", "tensor"), ("uint8", "bytes")]))
        tensors.append(TensorRecord(path, dtype, shape, tile, kind))
        grid = TileGrid(shape, tile)
        for index in range(min(grid.num_tiles, 5)):
            box = grid.box(index)
            if box.volume > 1 and draw(st.booleans()):
                d = next(d for d in range(box.ndim) if box.shape[d] > 1)
                part = Box(box.offset, (*box.shape[:d], box.shape[d] - 1, *box.shape[d + 1 :]))
                columns["partial"].append((len(columns["tile"]), part))
            columns["tile"].append(index)
        first.append(len(columns["tile"]))
    num = len(columns["tile"])
    packs = tuple(PackRecord(f"{i:064x}", draw(st.integers(2**33, 2**40))) for i in range(draw(st.integers(1, 3))))
    numbers = draw(st.lists(st.integers(1, 2**32 - 1), min_size=num, max_size=num))
    chunks = ChunkTable(
        first=np.array(first, np.uint64),
        tile=np.array(columns["tile"], np.uint32),
        digest=np.frombuffer(draw(st.binary(min_size=32 * num, max_size=32 * num)), np.uint8).reshape(num, 32),
        pack=np.array([n % len(packs) for n in numbers], np.uint32),
        offset=np.array([n // 2 for n in numbers], np.uint64),
        length=np.array(numbers, np.uint32),
        codec=np.array([n % 2 for n in numbers], np.uint8),
        partial_row=np.array([row for row, _ in columns["partial"]], np.uint64),
        partial_box=np.array([n for _, box in columns["partial"] for n in (*box.offset, *box.shape)], np.uint64),
        partial_start=np.cumsum([0, *(2 * box.ndim for _, box in columns["partial"])]),
    )
    return Manifest(
        run=draw(st.text(min_size=1, max_size=8)),
        step=draw(st.integers(0, 10**12 - 1)),
        created_seconds=draw(st.floats(allow_nan=False, allow_infinity=False)),
        transaction=draw(st.from_regex(r"\A[0-9a-f]{32}\Z")),
        world_size=draw(st.integers(1, 2**31)),
        tree=tree,
        tensors=tuple(tensors),
        chunks=chunks,
        packs=packs,
        writer=draw(st.text(max_size=8)),
        metadata=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    )


def _shapes(tensor):
    return tensor.shape, tensor.tile


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)


@given(manifests())
@settings(max_examples=40, deadline=None)
def test_manifests_come_back(manifest):
    data = encode_manifest(manifest)
    back = decode_manifest(data)
    assert back == manifest
    assert encode_manifest(back) == data


# Bytes of a stranger --------------------------------------------------------------------------------------------------

HEADS = st.sampled_from([MAGIC, FRAGMENT_MAGIC, MAGIC + b"\1\0\0\0", FRAGMENT_MAGIC + b"\1\0\0\0\2\0\0\0", b""])


@given(HEADS, st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_give_only_format_errors(head, rest):
    for decode in (decode_manifest, decode_fragment, decode_tree):
        with pytest.raises(FormatError):
            decode(head + b"\xff" + rest)


@given(
    st.binary(max_size=60)
    | st.text(alphabet='[]{}",:0123456789.eE-tnafdilrsub_ \\\ud800', max_size=60).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
)
def test_any_json_gives_a_tree_or_a_format_error(data):
    with contextlib.suppress(FormatError):
        assert decode_tree(encode_tree(decode_tree(data))) is not None


ANY_JSON = st.recursive(
    st.one_of(JSON, st.sampled_from(["dict", "list", "per_rank", "tensor", "float", "int", "a.b", 2**70, -1])),
    lambda children: st.lists(children, max_size=4),
    max_leaves=12,
)


@given(ANY_JSON)
@settings(deadline=None)
def test_any_json_value_gives_a_tree_or_a_format_error(doc):
    with contextlib.suppress(FormatError):
        decode_tree(json.dumps(doc).encode())


WHOLE = {
    "manifest": (MAGIC, Kind, decode_manifest),
    "fragment": (FRAGMENT_MAGIC, FragmentKind, decode_fragment),
}


@st.composite
def columns(draw):
    """Bytes of a section: numbers at the edges of every range, JSON of any form, or anything."""
    edge = st.sampled_from([0, 1, 2, 3, 31, 32, 255, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
    width = draw(st.sampled_from([1, 2, 4, 8]))
    numbers = draw(st.lists(edge, max_size=6))
    return draw(
        st.one_of(
            st.just(b"".join((n % 256**width).to_bytes(width, "little") for n in numbers)),
            ANY_JSON.map(lambda doc: json.dumps(doc).encode()),
            st.binary(max_size=70),
        )
    )


SEEDS = {
    "manifest": Manifest(
        "r",
        1,
        1.0,
        "0" * 32,
        2,
        DictNode((("w", TENSOR), ("b", TENSOR))),
        (TensorRecord(("w",), "int8", (4, 2), (2, 2)), TensorRecord(("b",), "int8", (3,), (3,))),
        ChunkTable(
            first=np.array([0, 3, 4], np.uint64),
            tile=np.array([0, 1, 1, 0], np.uint32),
            digest=np.zeros((4, 32), np.uint8),
            pack=np.zeros(4, np.uint32),
            offset=np.arange(4, dtype=np.uint64),
            length=np.ones(4, np.uint32),
            codec=np.zeros(4, np.uint8),
            partial_row=np.array([1, 2], np.uint64),
            partial_box=np.array([2, 0, 1, 2, 3, 0, 1, 2], np.uint64),
            partial_start=np.array([0, 4, 8], np.int64),
        ),
        (PackRecord("a" * 64, 100),),
    ),
    "fragment": Fragment(
        rank=1,
        plan_key=b"k",
        tree=TENSOR,
        per_rank=((("a",), TENSOR),),
        chunks=FragmentChunks.of(
            tensor=[0, 0],
            tile=[0, 1],
            digest=[b"x" * 32] * 2,
            pack=[0, 0],
            offset=[0, 1],
            length=[1, 1],
            codec=[0, 1],
            partial=[(1, Box((1, 1), (1, 1)))],
        ),
        packs=(PackRecord("a" * 64, 100),),
        replicas={0: b"y" * 32},
        counters={"n": 1},
    ),
}
SEED_BYTES = {
    "manifest": encode_manifest(SEEDS["manifest"]),
    "fragment": encode_fragment(SEEDS["fragment"]),
}


@pytest.mark.parametrize("what", list(WHOLE))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_sections_of_a_stranger_give_a_document_or_a_format_error(what, data):
    """The frame is right, so every check behind it is met: sections are swapped for other bytes, one or a few."""
    magic, kinds, decode = WHOLE[what]
    document = decode_document(SEED_BYTES[what], magic=magic, version=FORMAT_VERSION, what=what, known=frozenset(kinds))
    sections = {kind: bytes(payload) for kind, payload in document.sections.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        sections[data.draw(st.sampled_from(list(kinds)))] = data.draw(columns())
    changed = encode_document(magic, FORMAT_VERSION, [Section(kind, payload) for kind, payload in sections.items()])
    with contextlib.suppress(FormatError):
        decode(changed)


@pytest.mark.parametrize("what", list(WHOLE))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_bytes_changed_at_random_give_a_document_or_a_format_error(what, data):
    damaged = bytearray(SEED_BYTES[what])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    with contextlib.suppress(FormatError):
        WHOLE[what][2](bytes(damaged))
