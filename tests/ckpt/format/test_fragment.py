from __future__ import annotations

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from vescale_ckpt.errors import FormatError, InternalError, InvalidInputError, UnsupportedVersionError
from vescale_ckpt.format.document import Section, decode_document, encode_document
from vescale_ckpt.format.fragment import (
    MAGIC,
    Fragment,
    FragmentChunks,
    decode_fragment,
    decode_fragments,
    encode_fragment,
)
from vescale_ckpt.format.kinds import FragmentKind
from vescale_ckpt.format.manifest import decode_manifest
from vescale_ckpt.format.records import FORMAT_VERSION, PackRecord
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.state.tree import DictNode, TensorNode, ValueNode

T = TensorNode()


@pytest.fixture
def fragment():
    chunks = FragmentChunks.of(
        tensor=[5, 0, 0, 7],
        tile=[0, 3, 1, 2],
        digest=[bytes([i]) * 32 for i in range(4)],
        pack=[0, 1, 0, 1],
        offset=[0, 0, 40, 2**39],
        length=[40, 9, 8, 7],
        codec=[0, 1, 0, 0],
        partial=[(1, Box((4, 2), (1, 2))), (3, Box((6,), (5,)))],
    ).with_shares([(3, Box((7,), (2,)))])
    return Fragment(
        rank=3,
        plan_key=b"k" * 32,
        tree=DictNode((("a", T), ("x", ValueNode(0.1)))),
        per_rank=((("rng", "torch"), T), (("data", 0), DictNode((("pos", ValueNode(7)),)))),
        chunks=chunks,
        packs=(PackRecord("ab" * 32, 64), PackRecord("01" * 32, 2**40)),
        replicas={9: b"r" * 32, 2: b"s" * 32},
        counters={"bytes_put": 2**40, "seconds_put": 0.25, "puts": 0},
    )


def sections_of(fragment):
    data = encode_fragment(fragment)
    document = decode_document(data, magic=MAGIC, version=FORMAT_VERSION, what="f", known=frozenset(FragmentKind))
    return dict(document.sections)


def rebuilt(fragment, **changes):
    sections = sections_of(fragment) | {FragmentKind[name]: payload for name, payload in changes.items()}
    return encode_document(MAGIC, FORMAT_VERSION, [Section(k, p) for k, p in sections.items() if p is not None])


def test_there_and_back(fragment):
    data = encode_fragment(fragment)
    back = decode_fragment(data)
    assert back == fragment
    assert encode_fragment(back) == data
    assert list(back.replicas) == [9, 2]
    assert back.chunks.partial_box.tolist() == [4, 2, 1, 2, 6, 5]
    assert not back.chunks.digest.flags.writeable


def test_a_rank_that_wrote_nothing():
    fragment = Fragment(rank=0, plan_key=b"")
    assert decode_fragment(encode_fragment(fragment)) == fragment
    assert fragment.tree is None
    assert len(fragment.chunks) == 0


def test_ranks_with_equal_trees_share_one(fragment):
    other = dataclasses.replace(fragment, rank=4, tree=DictNode((("a", T),)))
    wanted = [fragment, dataclasses.replace(fragment, rank=5), other, dataclasses.replace(fragment, tree=None)]
    back = decode_fragments([encode_fragment(each) for each in wanted])
    assert back == wanted
    assert back[0].tree is back[1].tree
    assert back[0].tree is not back[2].tree
    with pytest.raises(FormatError):
        decode_fragments([encode_fragment(fragment), b"x"])


def test_a_fragment_is_no_manifest(fragment):
    with pytest.raises(FormatError, match="are none"):
        decode_manifest(encode_fragment(fragment))


def test_tables_compare_by_content(fragment):
    chunks = fragment.chunks
    assert chunks == dataclasses.replace(chunks)
    assert chunks != dataclasses.replace(chunks, tensor=chunks.tensor + np.uint32(1))
    assert chunks != 1
    with pytest.raises(TypeError):
        hash(chunks)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"rank": 2**31},
        {"rank": True},
        {"plan_key": b"x" * 65},
        {"counters": {"a": "b"}},
        {"counters": {"a": True}},
        {"counters": {"a": float("nan")}},
        {"counters": {"a": 2**70}},
        {"replicas": {1: b"short"}},
        {"tree": ValueNode(Ellipsis)},
        {"per_rank": ((("a",), ValueNode(Ellipsis)),)},
    ],
    ids=str,
)
def test_what_no_reader_would_take_is_refused(fragment, change):
    with pytest.raises(InvalidInputError):
        encode_fragment(dataclasses.replace(fragment, **change))


def test_columns_that_contradict_are_our_bug(fragment):
    chunks = fragment.chunks
    for change in (
        {"packs": fragment.packs[:1]},
        {"packs": (fragment.packs[0], fragment.packs[0])},
        {"chunks": dataclasses.replace(chunks, tensor=chunks.tensor[:-1])},
        {"chunks": dataclasses.replace(chunks, partial_ndim=chunks.partial_ndim[:-1])},
        {"chunks": dataclasses.replace(chunks, partial_ndim=chunks.partial_ndim + np.uint8(1))},
        {"chunks": dataclasses.replace(chunks, partial_row=chunks.partial_row[::-1].copy())},
        {"chunks": dataclasses.replace(chunks, length=np.full(4, 2**30, np.uint32))},
    ):
        with pytest.raises(InternalError):
            encode_fragment(dataclasses.replace(fragment, **change))


@pytest.mark.parametrize("name", [kind.name for kind in FragmentKind if kind is not FragmentKind.TREE])
def test_every_section_but_the_tree_is_needed(fragment, name):
    with pytest.raises(FormatError):
        decode_fragment(rebuilt(fragment, **{name: None}))
    assert decode_fragment(rebuilt(fragment, TREE=None)).tree is None


@pytest.mark.parametrize(
    "change",
    [
        {"PER_RANK": b"{}"},
        {"PER_RANK": b"[1]"},
        {"PER_RANK": b"[[1]]"},
        {"PER_RANK": b'[[["a"]]]'},
        {"PER_RANK": b'[["a",1]]'},
        {"PER_RANK": b"[[[true],1]]"},
        {"PER_RANK": b'[[["a"],{}]]'},
        {"PER_RANK": b"[" * 100_000},
        {"HEAD": b"[]"},
        {"HEAD": b'{"rank":"0","plan_key":"","counters":{}}'},
        {"HEAD": b'{"rank":-1,"plan_key":"","counters":{}}'},
        {"HEAD": b'{"rank":0,"plan_key":"x","counters":{}}'},
        {"HEAD": b'{"rank":0,"plan_key":"' + b"00" * 65 + b'","counters":{}}'},
        {"HEAD": b'{"rank":0,"plan_key":"","counters":[]}'},
        {"HEAD": b'{"rank":0,"plan_key":"","counters":{"a":null}}'},
        {"HEAD": b'{"rank":0,"plan_key":"","counters":{"a":[[1]]}}'},
        {"CHUNK_TENSOR": np.zeros(3, np.uint32)},
        {"CHUNK_PACK": np.full(4, 2, np.uint32)},
        {"CHUNK_CODEC": np.full(4, 9, np.uint8)},
        {"CHUNK_OFFSET": np.full(4, 2**64 - 1, np.uint64)},
        {"PARTIAL_ROW": np.array([3, 1], np.uint64)},
        {"PARTIAL_ROW": np.array([1, 4], np.uint64)},
        {"PARTIAL_NDIM": np.array([2, 2], np.uint8)},
        {"PARTIAL_BOX": np.zeros(7, np.uint64)},
        {"SHARE_ROW": np.array([2], np.uint64)},
        {"SHARE_ROW": np.array([2**63], np.uint64)},
        {"SHARE_ROW": np.array([1], np.uint64)},
        {"SHARE_ROW": np.array([3, 3], np.uint64), "SHARE_BOX": np.array([7, 2, 7, 2], np.uint64)},
        {"SHARE_BOX": np.array([7, 2, 1], np.uint64)},
        {"SHARE_BOX": np.array([7, 0], np.uint64)},
        {"SHARE_BOX": np.array([5, 2], np.uint64)},
        {"SHARE_BOX": np.array([10, 2], np.uint64)},
        {"REPLICA_TENSOR": np.array([1], np.uint32)},
        {"REPLICA_TENSOR": np.array([1, 1], np.uint32)},
        {"REPLICA_DIGEST": b"x" * 65},
    ],
    ids=lambda change: str(change)[:60],
)
def test_what_contradicts_itself_is_refused(fragment, change):
    with pytest.raises(FormatError):
        decode_fragment(rebuilt(fragment, **change))


def test_unknown_fields_are_ignored_and_newer_majors_refused(fragment):
    head = json.loads(bytes(sections_of(fragment)[FragmentKind.HEAD])) | {"new": 1}
    assert decode_fragment(rebuilt(fragment, HEAD=json.dumps(head).encode())) == fragment
    data = bytearray(encode_fragment(fragment))
    data[8] = 2
    with pytest.raises(UnsupportedVersionError, match=r"2\.0"):
        decode_fragment(bytes(data))


def test_every_cut_and_flip_gives_an_error_or_a_fragment(fragment):
    data = encode_fragment(fragment)
    for end in range(len(data)):
        with pytest.raises(FormatError):
            decode_fragment(data[:end])
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x81
        with contextlib.suppress(FormatError):
            decode_fragment(bytes(damaged))
