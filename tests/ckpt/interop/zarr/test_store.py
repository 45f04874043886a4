"""Snapshots, native and foreign, as zarr stores."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch
import zarr

import vescale_ckpt as vc
from vescale_ckpt.interop.zarr.view import ZarrView, chunk_shape

STATE = {
    "model": {"w": torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000), "b": torch.ones(7)},
    "half": torch.linspace(-1, 1, 10).to(torch.bfloat16),
    "f8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "step": 5,
}


@pytest.fixture(scope="module")
def snapshot():
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    with vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, STATE)
    return store["run@1"]


def test_zarr_python_reads_a_snapshot_of_the_store(snapshot):
    root = zarr.open_group(snapshot.to_zarr(), mode="r")
    assert sorted(root.array_keys()) == ["empty", "f8", "half", "model.b", "model.w", "scalar"]
    assert (root["model.w"][700:703, 5:900:7] == STATE["model"]["w"][700:703, 5:900:7].numpy()).all()
    assert (root["model.w"][...] == STATE["model"]["w"].numpy()).all()
    assert root["scalar"][()] == 3
    assert root["empty"].shape == (0, 4)


def test_what_zarr_python_lacks_is_shown_as_integers_and_said(snapshot):
    store = snapshot.to_zarr()
    root = zarr.open_group(store, mode="r")
    assert (root["half"][...] == STATE["half"].view(torch.int16).numpy().view(np.uint16)).all()
    assert root["half"].attrs["torch_dtype"] == "bfloat16"
    assert (root["f8"][...] == np.arange(256)).all()
    assert sorted(note.partition(":")[0] for note in store.view.notes) == ["f8", "half"]


def test_it_cannot_be_written(snapshot):
    root = zarr.open_group(snapshot.to_zarr(), mode="r")
    with pytest.raises(ValueError, match="read-only"):
        root["model.b"][0] = 3


def test_a_foreign_snapshot_is_shown_likewise(tmp_path):
    torch.save({"w": torch.arange(6).view(2, 3)}, tmp_path / "x.pt")
    with vc.open_foreign(tmp_path / "x.pt") as foreign:
        root = zarr.open_group(foreign.to_zarr(), mode="r")
        assert root["w"][1].tolist() == [3, 4, 5]


def test_nothing_is_read_before_it_is_asked_for(snapshot):
    read: list = []

    class Spy:
        tensors = staticmethod(snapshot.tensors)

        @staticmethod
        def read(name, box=None):
            read.append((name, box))
            return snapshot.read(name, box)

    view = ZarrView(Spy)
    assert view.get("model.w/zarr.json")
    assert view.has("model.w/c/0/0")
    assert not read
    chunk = view.get("model.w/c/1/0")
    assert chunk is not None
    assert len(read) == 1
    assert len(chunk) <= 4 << 20


@pytest.mark.parametrize(
    "key",
    ["model.w/c/0", "model.w/c/0/0/0", "model.w/c/99/0", "model.w/c/-1/0", "model.w/c/00/0", "x", "model.w/d/0/0", ""],
)
def test_keys_that_are_none_hold_nothing(snapshot, key):
    view = ZarrView(snapshot)
    assert view.get(key) is None
    assert not view.has(key)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), ()), ((0, 3), (1, 3)), ((10, 10), (2, 10)), ((3, 100), (1, 25)), ((1000,), (25,)), ((2, 2, 200), (1, 1, 25))],
)
def test_chunks_are_bounded(shape, expected):
    assert chunk_shape(shape, 4, 100) == expected
