"""zarr v3 groups that zarr-python wrote, and damage."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import zarr

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.foreign.detect import open_foreign

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning", "ignore::UserWarning")


@pytest.fixture
def group(tmp_path):
    """Arrays of several dtypes, chunks that do not divide them, packed in every way that is read, in nested groups."""
    root = zarr.open_group(tmp_path / "g", mode="w", attributes={"step": 3})
    arrays = {
        "a": np.arange(35, dtype="f4").reshape(5, 7),
        "n/b": np.arange(11, dtype="i8"),
        "n/m/c": (np.arange(6) % 2 == 0),
        "scalar": np.array(2.5),
        "h": np.arange(8, dtype="f2").reshape(2, 2, 2),
    }
    codecs = {"a": None, "n/b": zarr.codecs.ZstdCodec(level=3), "n/m/c": zarr.codecs.GzipCodec()}
    for name, array in arrays.items():
        chunks = tuple(max(1, size - 2) for size in array.shape)
        made = root.create_array(
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=chunks,
            compressors=codecs.get(name),
            config={"write_empty_chunks": True},
        )
        made[...] = array
    return tmp_path / "g", {name.replace("/", "."): array for name, array in arrays.items()}


def test_every_array_and_any_box(group):
    path, arrays = group
    snapshot = open_foreign(path)
    assert snapshot.format == "zarr"
    assert snapshot.metadata == {"step": 3}
    assert set(snapshot.tensors()) == set(arrays)
    for name, array in arrays.items():
        assert torch.equal(snapshot.read(name), torch.from_numpy(array)), name
    assert snapshot.read("a", (slice(2, 5), slice(4, 6))).tolist() == arrays["a"][2:5, 4:6].tolist()


def test_a_chunk_that_is_not_there_is_an_error_and_never_zeros(group):
    path, _ = group
    (path / "a" / "c" / "1" / "0").unlink()
    snapshot = open_foreign(path)
    assert snapshot.read("a", slice(0, 3)).shape == (3, 7)
    with pytest.raises(CorruptionError, match=r"a/c/1/0.*not there"):
        snapshot.read("a")


def test_a_chunk_of_another_size_is_refused(group):
    path, _ = group
    (path / "a" / "c" / "0" / "0").write_bytes(bytes(8))
    with pytest.raises(CorruptionError, match="a chunk has"):
        open_foreign(path).read("a")
    (path / "n" / "b" / "c" / "0").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(40))
    with pytest.raises(CorruptionError):
        open_foreign(path).read("n.b")


def test_what_is_not_understood_is_refused(group):
    path, _ = group
    for change in ({"data_type": "string"}, {"codecs": [{"name": "blosc"}]}, {"shape": "x"}, {"zarr_format": 2}):
        node = json.loads((path / "a" / "zarr.json").read_text())
        (path / "a" / "zarr.json").write_text(json.dumps({**node, **change}))
        with pytest.raises(FormatError):
            open_foreign(path)
        (path / "a" / "zarr.json").write_text(json.dumps(node))


def test_a_conversion_is_read_by_zarr_python_and_comes_back_to_the_bit(tmp_path):
    state = {
        "model.w": torch.randn(300, 70),
        "b": torch.randn(5).to(torch.bfloat16),
        "f8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "odd/name %": torch.ones(2),
        "__x": torch.ones(3),
    }
    torch.save(state, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "x.zarr")
    found = open_foreign(tmp_path / "x.zarr")
    assert set(found.tensors()) == set(state)
    for name, tensor in state.items():
        assert found.tensors()[name].dtype == tensor.dtype
        got = found.read(name)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    root = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert (root["model.w"][...] == state["model.w"].numpy()).all()
    assert root["b"].dtype == np.uint16
    assert root["b"].attrs["torch_dtype"] == "bfloat16"
