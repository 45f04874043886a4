"""What a DCP table says, and the contradictions that are refused."""

from __future__ import annotations

import pickle  # noqa: TID251 -- what torch writes

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.dcp.table import Item, read_table


def table(chunks=((0, 4),), places=None, size=4, file="__0_0.distcp", dtype=torch.float32, **storage) -> bytes:
    """The pickle of a tensor "w" of ``size`` elements in chunks (offset, length), and an object "n"."""
    entry = TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size([size]),
        [ChunkStorageMetadata(torch.Size([start]), torch.Size([length])) for start, length in chunks],
    )
    places = [start for start, _ in chunks] if places is None else places
    data = {MetadataIndex("w", [start]): _StorageInfo(file, 10 * start, 10, **storage) for start in places}
    data[MetadataIndex("n")] = _StorageInfo(file, 500, 5)
    entries = {"w": entry, "n": BytesStorageMetadata()}
    return pickle.dumps(Metadata(entries, planner_data={"w": ("a", 0, "w")}, storage_data=data))


def test_tensors_objects_and_paths():
    found = read_table(table(((0, 3), (3, 1))), "x")
    assert found.tensors["w"].shape == (4,)
    assert found.tensors["w"].dtype is torch.float32
    assert found.tensors["w"].chunks == (
        (Box((0,), (3,)), Item("__0_0.distcp", 0, 10)),
        (Box((3,), (1,)), Item("__0_0.distcp", 30, 10)),
    )
    assert found.objects == {"n": Item("__0_0.distcp", 500, 5)}
    assert found.paths == {"w": ("a", 0, "w")}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (table(file="../x"), "no plain name"),
        (table(file="/etc/passwd"), "no plain name"),
        (table(file=3), "no plain name"),
        (table(((0, 5),)), "not in"),
        (table(places=[1]), "does not say where"),
        (table(dtype=torch.qint8), "torch.qint8"),
        (table(transform_descriptors=("zstd",)), "zstd"),
        (pickle.dumps({"a": 1}), "no Metadata"),
        (pickle.dumps(Metadata({}, None, None)), "no dict"),
        (pickle.dumps(Metadata({"w": MetadataIndex("w")}, None, {})), "MetadataIndex"),
        (pickle.dumps(Metadata({"n": BytesStorageMetadata()}, None, {})), "does not say where"),
    ],
)
def test_contradictions_are_refused(data, match):
    with pytest.raises(FormatError, match=match):
        read_table(data, "x")


def test_a_chunk_that_is_stored_twice_is_refused():
    data = {MetadataIndex("w", [0], index=i): _StorageInfo("f", 0, 1) for i in range(2)}
    assert len(data) == 1  # torch's own indexes are equal; a stranger's pickle need not agree
    raw = pickle.dumps([MetadataIndex("w", [0]), MetadataIndex("w", [0])])
    assert raw
    with pytest.raises(CorruptionError, match="twice"):
        read_table(_twice(), "x")


def _twice() -> bytes:
    class Loose(MetadataIndex):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

        def __reduce__(self):
            return MetadataIndex, (self.fqn,), {"fqn": self.fqn, "offset": self.offset, "index": None}

    places = {Loose("w", [0]): _StorageInfo("f", 0, 1), Loose("w", [0]): _StorageInfo("f", 1, 1)}
    return pickle.dumps(Metadata({}, None, places))
