"""Makes the frozen files of format version 1: run once, checked in, and never made again for the same version.

    python tests/compat/make_v1.py [folder]

What comes out must be readable by every later version; ``test_can_read_v1.py`` holds that. The content is fixed here in
full and uses no code of the package but the records and the codec, so that it says the same for ever.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from pathlib import Path

import numpy as np

from vescale_ckpt.format.fragment import Fragment, FragmentChunks, encode_fragment
from vescale_ckpt.format.manifest import encode_manifest, manifest_name
from vescale_ckpt.format.records import ChunkTable, Manifest, PackRecord, TensorRecord
from vescale_ckpt.geometry.box import Box
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

DATA = Path(__file__).parent / "data" / "v1"
T = TensorNode()


def digest(number: int) -> bytes:
    """Return 32 bytes that stand for the digest of a chunk."""
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def values() -> DictNode:
    """Return one of every plain value."""
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
    plain = {
        "none": None,
        "true": True,
        "false": False,
        "int": -5,
        "int53": 2**53 - 1,
        "int54": 2**53,
        "huge": -(2**200),
        "float": 0.1,
        "minus zero": -0.0,
        "infinity": float("-inf"),
        "nan": nan,
        "complex": complex(-0.0, nan),
        "str": 'é\n"\\\u2028\U0001f600',
        "half a character": "a\ud800",
        "bytes": bytes(range(256)),
        "empty": "",
        "dtype": Foreign("torch.dtype", "float8_e4m3fn"),
        "size": Foreign("torch.Size", "3,0,5"),
        "device": Foreign("torch.device", "cuda:1"),
        "layout": Foreign("torch.layout", "sparse_coo"),
        "memory format": Foreign("torch.memory_format", "channels_last"),
        "numpy": Foreign("numpy.float32", "0000c03f"),
        "of a library to come": Foreign("jax.dtype", "float1"),
    }
    return DictNode(tuple((key, ValueNode(value)) for key, value in plain.items()))


def containers() -> DictNode:
    """Return one of every container, with keys that are easily taken for one another."""
    return DictNode(
        (
            ("a.b", T),
            ("a", DictNode((("b", T), (0, ValueNode("int")), ("0", ValueNode("str")), (-(2**63), ValueNode(1))))),
            ("", ListNode((T, TupleNode((T, ValueNode(None))), ListNode(()), TupleNode(()), DictNode(())))),
            ("ordered", DictNode((("z", ValueNode(1)), ("a", ValueNode(2))), kind=DictKind.ORDERED)),
            ("counter", DictNode(((30, ValueNode(1)),), kind=DictKind.COUNTER)),
            ("union", DictNode((("é", T),), union=True)),
            ("rng", PerRankNode(((0, DictNode((("torch", T),))), (2, ValueNode(7))))),
        )
    )


def full_manifest() -> Manifest:
    """Return a manifest with one of everything."""
    tensors = (
        TensorRecord(("state", "a", "b"), "bfloat16", (10, 6), (4, 3)),
        TensorRecord(("state", "a.b"), "bfloat16", (10, 6), (4, 3), alias_of=0),
        TensorRecord(("state", "", 0), "float32", (0, 5), (1, 5)),
        TensorRecord(("state", "", 1, 0), "uint8", (5,), (5,), kind="bytes"),
        TensorRecord(("state", "union", "é"), "complex64", (), (), kind="numpy"),
        TensorRecord(("state", "rng", 0, "torch"), "uint8", (2, 2, 2, 3), (1, 2, 2, 3)),
    )
    tile = [0, 1, 1, 2, 3, 4, 5, 0, 0, 0, 1]
    chunks = ChunkTable(
        first=np.array([0, 7, 7, 7, 8, 9, 11], np.uint64),
        tile=np.array(tile, np.uint32),
        digest=np.frombuffer(b"".join(map(digest, range(11))), np.uint8).reshape(11, 32),
        pack=np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2], np.uint32),
        offset=np.array([0, 24, 36, 48, 72, 0, 12, 24, 29, 2**40, 0], np.uint64),
        length=np.array([24, 12, 12, 24, 24, 12, 12, 5, 8, 11, 12], np.uint32),
        codec=np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], np.uint8),
        partial_row=np.array([1, 2], np.uint64),
        partial_box=np.array([0, 3, 2, 3, 2, 3, 2, 3], np.uint64),
        partial_start=np.array([0, 4, 8], np.int64),
    )
    return Manifest(
        run="llama 7b [é]",
        step=999_999_999_999,
        created_seconds=1_700_000_000.123456,
        transaction="0123456789abcdeffedcba9876543210",
        world_size=3,
        tree=DictNode((("state", containers()), ("values", values()))),
        tensors=tensors,
        chunks=chunks,
        packs=tuple(PackRecord(digest(100 + i).hex(), size) for i, size in enumerate((4096, 100, 2**41))),
        writer="vescale-ckpt 0.1.0",
        metadata={"loss": 0.1, "note": "é", "nested": [None, True, {"n": -(2**63), "m": 2**64 - 1}]},
    )


def empty_manifest() -> Manifest:
    """Return the smallest manifest; FORMAT.md shows its bytes."""
    return Manifest("r", 0, 0.0, "0" * 32, 1, DictNode(()), (), ChunkTable.empty(0), ())


def full_fragment() -> Fragment:
    """Return a fragment with one of everything."""
    return Fragment(
        rank=2,
        plan_key=digest(200),
        tree=DictNode((("w", T), ("rng", PerRankNode(())))),
        per_rank=((("rng",), ListNode((T, ValueNode(-0.0)))),),
        chunks=FragmentChunks.of(
            tensor=[3, 0, 0],
            tile=[0, 7, 1],
            digest=[digest(300 + i) for i in range(3)],
            pack=[1, 0, 1],
            offset=[0, 2**40, 5],
            length=[5, 6, 7],
            codec=[0, 1, 0],
            partial=[(0, Box((1, 0, 2), (1, 2, 3))), (2, Box((4,), (5,)))],
        ),
        packs=(PackRecord(digest(400).hex(), 2**41), PackRecord(digest(401).hex(), 12)),
        replicas={7: digest(500), 1: digest(501)},
        counters={"bytes_put": 2**40, "seconds_put": 0.25},
    )


MANIFESTS = {"full": full_manifest, "empty": empty_manifest}


def main(folder: Path) -> None:
    """Write the files; refuse to replace any."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"manifest-{name}": encode_manifest(make()) for name, make in MANIFESTS.items()}
    files["fragment-full"] = encode_fragment(full_fragment())
    for name, data in files.items():
        with (folder / f"{name}.bin").open("xb") as file:
            file.write(data)
        print(f"{manifest_name(data)}  {name}.bin  {len(data)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
