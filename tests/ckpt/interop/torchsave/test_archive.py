"""torch.save archives: every dtype and view that torch writes, and the places of their bytes."""

from __future__ import annotations

import pytest
import torch

from tests.cases.inputs import same_bits
from tests.ckpt.interop.foreign import bad
from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign.places import open_files
from vescale_ckpt.interop.foreign.regions import fill_region
from vescale_ckpt.interop.torchsave.archive import Archive
from vescale_ckpt.state.dtypes import DTYPE_NAMES, dtype_from_name


def read(path) -> dict:
    files, name = open_files(path)
    archive = Archive(files, name)
    found = {}
    for key, tensor in archive.value.items():
        found[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        fill_region(files, archive.region(tensor), Box.whole(tensor.shape), found[key])
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_every_byte(tmp_path):
    raw = torch.arange(256, dtype=torch.uint8)
    state = {}
    for name in sorted(DTYPE_NAMES):
        dtype = dtype_from_name(name)
        source = raw % 2 if dtype is torch.bool else raw
        state[name] = source.repeat(2).view(dtype).reshape(4, -1)
    torch.save(state, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")
    assert found.keys() == state.keys()
    assert all(found[name].dtype == state[name].dtype and same_bits(found[name], state[name]) for name in state)


def test_views_parameters_and_scalars(tmp_path):
    base = torch.arange(60.0).view(3, 4, 5)
    state = {
        "t": base.permute(2, 0, 1),
        "step": base[:, ::2, 1::3],
        "part": base[1:, 2],
        "row": base[2, 3],
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "wide": torch.ones(1).expand(1000),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(base),
    }
    torch.save(state, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_the_order_of_bytes_is_minded(tmp_path):
    members = {
        "x/version": b"3\n",
        "x/byteorder": b"big",
        "x/data/0": torch.arange(4.0).numpy().astype(">f4").tobytes(),
    }
    bad.archive(tmp_path / "x.pt", {"x/data.pkl": bad.tensor_pickle(), **members})
    assert read(tmp_path / "x.pt")["w"].tolist() == [[0, 1], [2, 3]]
    bad.archive(tmp_path / "y.pt", {"x/data.pkl": bad.tensor_pickle(), **members, "x/byteorder": b"odd"})
    with pytest.raises(FormatError, match="byte order"):
        read(tmp_path / "y.pt")


def test_a_flipped_bit_of_the_pickle_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "x.pt"
    bad.archive(path, {"x/data.pkl": bad.tensor_pickle(), "x/data/0": bytes(16)})
    data = bytearray(path.read_bytes())
    data[data.index(b"storage")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="checksum"):
        read(path)


def test_members_that_overlap_are_refused(tmp_path):
    path = tmp_path / "x.pt"
    bad.archive(path, {"x/data.pkl": bad.tensor_pickle(), "x/data/0": bytes(16), "x/data/1": bytes(16)})
    data = path.read_bytes()
    at = data.rindex(b"x/data/1") - 4  # of the second's place in the directory
    first = data.index(b"x/data/0") - 30
    path.write_bytes(data[:at] + first.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CorruptionError, match="overlaps"):
        read(path)
