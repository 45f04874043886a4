from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vescale_ckpt.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, StorageError
from vescale_ckpt.interop.safetensors import SafetensorsFile, read_safetensors_header
from vescale_ckpt.interop.safetensors.dtypes import BITS, torch_dtype


def blob(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {"w": entry([2, 2], 0, 16)}
BAD = {
    "truncated_data": blob(GOOD, bytes(9)),
    "truncated_header": blob(GOOD)[:20],
    "seven_bytes": b"\x01" * 7,
    "header_longer_than_file": blob(GOOD, bytes(16), length=10_000),
    "not_json": blob(b"{nope", bytes(16)),
    "unknown_dtype": blob({"w": entry([2, 2], 0, 16, "F99")}, bytes(16)),
    "shape_and_range_disagree": blob({"w": entry([1000, 1000], 0, 4)}, bytes(4)),
    "range_past_end": blob({"w": entry([4], 100, 116)}, bytes(16)),
    "is_really_a_zip": b"PK\x03\x04" + bytes(200),
    "empty": b"",
    "length_of_all_ones": b"\xff" * 100,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def test_the_librarys_file_is_read_as_the_library_wrote_it(path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in sorted(BITS):
        dtype = torch_dtype(name)
        if dtype is not None:
            raw = torch.randint(0, 2 if name == "BOOL" else 256, (3, 2 * dtype.itemsize), generator=generator)
            tensors[f"t.{name}"] = raw.to(torch.uint8).view(dtype)
    tensors |= {"scalar": torch.tensor(1.5), "none": torch.zeros(0, 7), "ß": torch.arange(3)}
    save_file(tensors, path, {"format": "pt"})
    with SafetensorsFile(path) as file:
        assert file.header.metadata == {"format": "pt"}
        assert set(file.header.tensors) == set(tensors)
        for name, tensor in tensors.items():
            read = file.read(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_name_and_closed(path, case):
    path.write_bytes(BAD[case])
    with pytest.raises(FormatError, match=str(path)):
        read_safetensors_header(path)
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == path]


def test_a_cut_at_any_byte_is_refused(path):
    save_file({"a": torch.arange(4), "b": torch.ones(2)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            read_safetensors_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptionError, match="belong to no tensor"):
        read_safetensors_header(path)


def test_a_file_that_is_not_there(path):
    with pytest.raises(NotFoundError, match=str(path)):
        read_safetensors_header(path)


def test_a_folder_is_no_file(path):
    path.mkdir()
    with pytest.raises(InvalidInputError, match="no file"):
        read_safetensors_header(path)


def test_a_pipe_is_not_waited_for(path):
    os.mkfifo(path)
    errors = []

    def read():
        try:
            read_safetensors_header(path)
        except InvalidInputError as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(5)
    assert len(errors) == 1


def test_a_link_is_followed_as_the_hubs_cache_has_them(path, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "blob")
    path.symlink_to("blob")
    with SafetensorsFile(path) as file:
        assert torch.equal(file.read("w"), torch.ones(2))


def test_a_name_that_is_not_there(path):
    path.write_bytes(blob(GOOD, bytes(16)))
    with SafetensorsFile(path) as file, pytest.raises(NotFoundError, match="'v'"):
        file.read("v")


def test_what_torch_has_no_tensors_for_is_said(path):
    path.write_bytes(blob({"six": entry([4], 0, 3, "F6_E2M3"), "odd": entry([2, 3], 3, 6, "F4")}, bytes(6)))
    with SafetensorsFile(path) as file:
        for name in ("six", "odd"):
            with pytest.raises(FormatError, match=f"'{name}'"):
                file.read(name)


def test_bytes_that_are_no_booleans_are_refused(path):
    path.write_bytes(blob({"b": entry([2], 0, 2, "BOOL")}, b"\x01\x02"))
    with SafetensorsFile(path) as file, pytest.raises(FormatError, match="no booleans"):
        file.read("b")


def test_a_file_that_is_cut_after_it_was_opened(path):
    path.write_bytes(blob(GOOD, bytes(16)))
    with SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CorruptionError, match="1 bytes are missing"):
            file.read("w")


def test_more_than_memory_is_an_error_and_no_crash(path, monkeypatch):
    path.write_bytes(blob(GOOD, bytes(16)))

    def refuse(*_args, **_kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with SafetensorsFile(path) as file:
        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.raises(StorageError, match="no memory for its 16 bytes"):
            file.read("w")
