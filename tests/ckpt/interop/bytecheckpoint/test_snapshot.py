"""ByteCheckpoint folders, written by code that follows its layout: raw items, and older ones in archives."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.interop.foreign.detect import open_foreign
from vescale_ckpt.interop.foreign.pickles import Named, Record
from vescale_ckpt.interop.torchsave.encode import encode_pickle

TORCH, BYTE = "torch.distributed.checkpoint.metadata", "bytecheckpoint.checkpointer.meta_type"
W = torch.arange(35.0).view(7, 5)
HALF = torch.linspace(-1, 1, 6).to(torch.bfloat16).view(2, 3)


def record(module, name, **state):
    return Record(Named(module, name), (), state)


def write_part(folder, tensors, objects, ranks=2) -> None:
    """Rows of each tensor over the ranks; a file a rank, raw bytes one after another; one table of all."""
    folder.mkdir(parents=True)
    entries, places, described = {}, {}, {}
    files = [bytearray() for _ in range(ranks)]
    for name, tensor in tensors.items():
        chunks, at = [], 0
        for rank, part in enumerate(tensor.chunk(ranks)):
            offset = torch.Size([at, *[0] * (tensor.ndim - 1)])
            chunks.append(record(TORCH, "ChunkStorageMetadata", offsets=offset, sizes=part.shape))
            raw = part.contiguous().view(torch.uint8).numpy().tobytes()
            index = record(TORCH, "MetadataIndex", fqn=name, offset=offset, index=rank)
            places[index] = record(
                BYTE, "_StorageInfo", relative_path=f"__{rank}_0.distcp", offset=len(files[rank]), length=len(raw)
            )
            described[index] = b"described"
            files[rank] += raw
            at += len(part)
        properties = Record(Named(TORCH, "TensorProperties"), (), {}, (tensor.dtype, None, False, None, False))
        entries[name] = record(TORCH, "TensorStorageMetadata", properties=properties, size=tensor.shape, chunks=chunks)
    for name, value in objects.items():
        stream = io.BytesIO()
        torch.save(value, stream)
        entries[name] = record(TORCH, "BytesStorageMetadata")
        index = record(TORCH, "MetadataIndex", fqn=name, offset=None, index=None)
        places[index] = record(
            BYTE, "_StorageInfo", relative_path="__0_0.distcp", offset=len(files[0]), length=len(stream.getvalue())
        )
        described[index] = None
        files[0] += stream.getvalue()
    table = record(
        BYTE,
        "Metadata",
        state_dict_metadata=entries,
        storage_data=places,
        all_tensor_metadata=described,
        user_defined_dict={"step": 3},
    )
    (folder / ".metadata").write_bytes(encode_pickle(table))
    for rank, data in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(data)


@pytest.fixture
def folder(tmp_path):
    write_part(tmp_path / "ckpt" / "model", {"w": W, "half": HALF}, {})
    write_part(tmp_path / "ckpt" / "optimizer", {"state.w.exp_avg": W * 2}, {"param_groups": [{"lr": 0.1}]}, ranks=3)
    return tmp_path / "ckpt"


def test_all_parts_are_one_snapshot(folder):
    snapshot = open_foreign(folder)
    assert snapshot.format == "bytecheckpoint"
    assert torch.equal(snapshot.read("model.w"), W)
    assert torch.equal(snapshot.read("model.half"), HALF)
    assert torch.equal(snapshot.read("model.w", (slice(2, 6), slice(1, 3))), W[2:6, 1:3])
    assert torch.equal(snapshot.read("optimizer.state.w.exp_avg"), W * 2)
    assert dict(snapshot.values) == {"optimizer.param_groups": [{"lr": 0.1}]}


@pytest.mark.filterwarnings("ignore")
def test_older_parts_whose_items_are_archives(tmp_path):
    dcp.save({"w": W}, checkpoint_id=tmp_path / "ckpt" / "model", no_dist=True)
    assert torch.equal(open_foreign(tmp_path / "ckpt").read("model.w"), W)


def test_a_cut_file_is_told(folder):
    path = folder / "model" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="it was cut"):
        open_foreign(folder)
