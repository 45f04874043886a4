from __future__ import annotations

import hashlib

import numpy as np
import pytest

from vescale_ckpt.format.records import ChunkTable, Manifest, PackRecord, TensorRecord
from vescale_ckpt.state.tree import (
    DictKind,
    DictNode,
    Foreign,
    ListNode,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
)

T = TensorNode()


def make_manifest() -> Manifest:
    """A manifest with one of everything: 0-d, empty and tiled tensors, an alias, parts of tiles, per-rank values."""
    tree = DictNode(
        (
            ("model", DictNode((("w", T), ("bias", T), ("tied", T), ("scale", T)), union=True)),
            ("extra", ListNode((T, TupleNode((ValueNode(0.1), ValueNode(None), ValueNode(True), ValueNode(2**80)))))),
            (3, ValueNode(Foreign("torch.dtype", "bfloat16"))),
            ("milestones", DictNode(((30, ValueNode(1)),), kind=DictKind.COUNTER)),
            ("rng", PerRankNode(((0, T), (1, T)))),
        )
    )
    tensors = (
        TensorRecord(("model", "w"), "bfloat16", (10, 6), (4, 3)),  # 3 x 2 tiles
        TensorRecord(("model", "bias"), "float32", (0, 5), (1, 5)),
        TensorRecord(("model", "tied"), "bfloat16", (10, 6), (4, 3), alias_of=0),
        TensorRecord(("model", "scale"), "float8_e4m3fn", (), ()),
        TensorRecord(("extra", 0), "uint8", (5,), (5,), kind="numpy"),
        TensorRecord(("rng", 0), "uint8", (16,), (16,)),
        TensorRecord(("rng", 1), "uint8", (16,), (16,)),
    )
    # tile 1 of w comes in two parts
    tile = np.array([0, 1, 1, 2, 3, 4, 5, 0, 0, 0, 0], np.uint32)
    num = len(tile)
    chunks = ChunkTable(
        first=np.array([0, 7, 7, 7, 8, 9, 10, 11], np.uint64),
        tile=tile,
        digest=np.frombuffer(b"".join(hashlib.sha256(bytes([i])).digest() for i in range(num)), np.uint8).reshape(
            num, 32
        ),
        pack=np.array([0] * 6 + [1] * 5, np.uint32),
        offset=np.arange(0, 24 * num, 24, dtype=np.uint64),
        length=np.array([24, 12, 12, 24, 24, 12, 12, 1, 5, 16, 16], np.uint32),
        codec=np.array([0] * 10 + [1], np.uint8),
        partial_row=np.array([1, 2], np.uint64),
        partial_box=np.array([0, 3, 2, 3, 2, 3, 2, 3], np.uint64),
        partial_start=np.array([0, 4, 8], np.int64),
    )
    packs = (PackRecord("ab" * 32, 4096), PackRecord("01" * 32, 2**40))
    return Manifest(
        run="llama é",
        step=1200,
        created_seconds=1.7e9 + 0.25,
        transaction="0123456789abcdef" * 2,
        world_size=2,
        tree=tree,
        tensors=tensors,
        chunks=chunks,
        packs=packs,
        writer="vescale-ckpt 0.1",
        metadata={"loss": 1.5, "tags": ["a", None, True, {"n": -3}]},
    )


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest()
