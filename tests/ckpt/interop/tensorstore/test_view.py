"""Tensors of snapshots as TensorStores, and OCDBT databases as snapshots."""

from __future__ import annotations

import pytest
import tensorstore as ts
import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import CorruptionError, FormatError, NotFoundError

W = torch.arange(600.0).view(20, 30)
HALF = torch.linspace(-1, 1, 10).to(torch.bfloat16)


@pytest.fixture
def foreign(tmp_path):
    torch.save({"w": W, "half": HALF, "scalar": torch.tensor(3)}, tmp_path / "x.pt")
    with vc.open_foreign(tmp_path / "x.pt") as snapshot:
        yield snapshot


def test_a_tensor_is_lazy_and_right(foreign):
    store = foreign.tensorstore("w")
    assert store.shape == (20, 30)
    assert (store[3:5, 7].read().result() == W[3:5, 7].numpy()).all()
    assert (store.read().result() == W.numpy()).all()
    assert foreign.tensorstore("scalar").read().result() == 3


def test_bfloat16_has_its_name(foreign):
    store = foreign.tensorstore("half")
    assert store.dtype == ts.bfloat16
    assert torch.equal(torch.from_numpy(store.read().result().view("i2")).view(torch.bfloat16), HALF)


def test_what_is_not_there_is_told(foreign):
    with pytest.raises(NotFoundError, match="'v'"):
        foreign.tensorstore("v")


@pytest.fixture
def database(tmp_path):
    """What Orbax writes: zarr arrays in one OCDBT database; here of both versions."""
    base = f"file://{tmp_path}/db/"
    for name, driver, tensor in (("params.w", "zarr", W), ("params.v", "zarr3", W * 2)):
        spec = {"driver": driver, "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        dtype = ts.float32
        store = ts.open(spec, create=True, dtype=dtype, shape=list(tensor.shape)).result()
        store.write(tensor.numpy()).result()
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "half/"}}
    ts.open(spec, create=True, dtype=ts.bfloat16, shape=[10]).result().write(
        HALF.view(torch.int16).numpy().view(ts.bfloat16.numpy_dtype)
    ).result()
    return tmp_path / "db"


def test_a_database_is_read_in_place(database):
    snapshot = vc.open_foreign(database)
    assert snapshot.format == "ocdbt"
    assert set(snapshot.tensors()) == {"params.w", "params.v", "half"}
    assert torch.equal(snapshot.read("params.w"), W)
    assert torch.equal(snapshot.read("params.v", (slice(3, 5), slice(2, 9))), (W * 2)[3:5, 2:9])
    assert torch.equal(snapshot.read("half"), HALF)


def test_a_damaged_database_is_refused(database):
    (database / "manifest.ocdbt").write_bytes(b"x" * 100)
    with pytest.raises(FormatError, match="OCDBT"):
        vc.open_foreign(database)


def test_lost_data_is_an_error_and_never_zeros(database):
    for path in database.rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    with pytest.raises((CorruptionError, FormatError)):
        vc.open_foreign(database).read("params.w")
