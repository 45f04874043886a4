"""numpy's files: every dtype, order and packing that numpy writes, and nothing that it would unpickle."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.foreign.detect import open_foreign

ARRAYS = {
    **{dtype: (np.arange(24) % 2).astype(dtype).reshape(2, 3, 4) for dtype in ("?", "u1", "i1", "<u2", "<i8", "<u8")},
    **{dtype: np.linspace(-3, 3, 24).astype(dtype).reshape(4, 6) for dtype in ("<f2", "<f4", "<f8", "<c8", "<c16")},
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3), "f4"),
    "fortran": np.asfortranarray(np.arange(24, dtype="i4").reshape(4, 6)),
    "big_endian": np.arange(5, dtype=">i4"),
    "big_complex": (np.arange(4) + 1j).astype(">c8"),
    "a.b/c": np.arange(3, dtype="f4"),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_array_and_any_box(tmp_path, save):
    save(tmp_path / "x.npz", **ARRAYS)
    snapshot = open_foreign(tmp_path / "x.npz")
    assert snapshot.format == "npz"
    assert set(snapshot.tensors()) == set(ARRAYS)
    for name, array in ARRAYS.items():
        expected = torch.from_numpy(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="))).view(array.shape)
        assert torch.equal(snapshot.read(name), expected), name
        if array.ndim > 1:
            assert torch.equal(snapshot.read(name, (slice(1, 3), slice(2, 3))), expected[1:3, 2:3]), name
            assert torch.equal(snapshot.read(name, slice(0, 1)), expected[:1]), name


def test_one_npy_file(tmp_path):
    np.save(tmp_path / "w.npy", ARRAYS["<f4"])
    assert torch.equal(open_foreign(tmp_path / "w.npy").read("w"), torch.from_numpy(ARRAYS["<f4"]))


def test_what_numpy_would_unpickle_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", w=np.array([{"a": 1}], dtype=object))
    with pytest.raises(FormatError, match="no plain numbers"):
        open_foreign(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", w=np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]))
    with pytest.raises(FormatError, match="no plain numbers"):
        open_foreign(tmp_path / "y.npz")


def archive(path, text: bytes, data: bytes, method=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        file.writestr("w.npy", header + data)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", bytes(8)),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1048576)}", bytes(8)),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}", bytes(8)),
        (b"{'descr': '<f4', 'fortran_order': False}", bytes(8)),
        (b"{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}", bytes(8)),
        (b"__import__('os').mkdir('MARKER')", b""),
        (b"(" * 5000, b""),
        (b"\xff\xfe", b""),
    ],
)
def test_headers_that_lie_or_are_code_are_refused(tmp_path, monkeypatch, text, data):
    monkeypatch.chdir(tmp_path)
    archive(tmp_path / "x.npz", text, data)
    with pytest.raises(FormatError):
        open_foreign(tmp_path / "x.npz")
    assert not (tmp_path / "MARKER").exists()


def test_a_bomb_is_read_in_bounded_pieces(tmp_path):
    num_bytes = 64 << 20
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({num_bytes},)}}".encode()
    archive(tmp_path / "x.npz", text, bytes(num_bytes), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.npz").stat().st_size < 100_000
    assert open_foreign(tmp_path / "x.npz").read("w", slice(num_bytes - 5, num_bytes)).tolist() == [0] * 5


def test_a_member_that_unpacks_to_less_or_to_something_else_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", w=np.random.default_rng(0).integers(0, 9, 100_000))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[50_000 if len(data) > 60_000 else len(data) // 2] ^= 0xFF
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(CorruptionError, match="unpack"):
        open_foreign(tmp_path / "x.npz").read("w")
