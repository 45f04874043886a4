"""One safetensors file, open: its header checked once, its tensors read one at a time.

Tensors are read and not mapped: a file that is cut while it is mapped ends the process.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from vescale_ckpt.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError, StorageError
from vescale_ckpt.interop.safetensors.dtypes import torch_dtype, torch_shape
from vescale_ckpt.interop.safetensors.header import LENGTH_BYTES, SafetensorsHeader, header_length, parse_header
from vescale_ckpt.interop.safetensors.local import file_errors
from vescale_ckpt.stage.raw import memory_of

if TYPE_CHECKING:
    import io
    import os


def read_safetensors_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Return what a safetensors file says of itself, after all of it was checked against the file's size.

    Raises:
        FormatError: it is no safetensors file.
        CorruptionError: it was cut or changed.
        ObjectNotFoundError: there is none.
        StorageError: it cannot be read.
    """
    with SafetensorsFile(path) as file:
        return file.header


class SafetensorsFile:
    """A file that is open for reading; the errors are those of ``read_safetensors_header``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with file_errors("read", self.path):
            # Asked before opening: opening a pipe waits for its other end.
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise InvalidInputError(f"cannot read {self.path}: it is no file", path=str(self.path))
            self._file: io.FileIO = self.path.open("rb", buffering=0)
        try:
            with file_errors("read", self.path):
                self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> SafetensorsHeader:
        what = str(self.path)
        file_bytes = self._file.seek(0, 2)
        self._file.seek(0)
        length = header_length(self._file.read(LENGTH_BYTES) or b"", file_bytes, what)
        text = bytearray(length)
        self._fill(memoryview(text), "its header")
        return parse_header(bytes(text), file_bytes - LENGTH_BYTES - length, what)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as a new CPU tensor.

        Raises:
            NotFoundError: the file has none of this name.
            FormatError: torch has no tensors of this dtype, or the bytes are no values of it.
            CorruptionError: the file was cut since it was opened.
            StorageError: it cannot be read, or memory does not suffice.
        """
        entry = self.header.tensors.get(name)
        if entry is None:
            raise NotFoundError(f"cannot read {name!r}: {self.path} has no tensor of this name", fqn=name)
        dtype, shape = torch_dtype(entry.dtype), torch_shape(entry.dtype, entry.shape)
        if dtype is None or shape is None:
            raise FormatError(
                f"cannot read {name!r} of {self.path}: torch {torch.__version__} has no tensors of {entry.dtype} with "
                f"shape {entry.shape}",
                fqn=name,
            )
        try:
            raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"cannot read {name!r} of {self.path}: no memory for its {entry.num_bytes} bytes", fqn=name
            ) from error
        with file_errors("read", self.path):
            self._file.seek(self.header.data_start + entry.start)
            self._fill(memory_of(raw), repr(name))
        if dtype is torch.bool and raw.numel() and int(raw.max()) > 1:
            raise FormatError(f"cannot read {name!r} of {self.path}: it holds bytes that are no booleans", fqn=name)
        return raw.view(dtype).view(shape)

    def _fill(self, out: memoryview, noun: str) -> None:
        filled = 0
        while filled < len(out):
            num = self._file.readinto(out[filled:])
            if not num:
                raise CorruptionError(
                    f"cannot read {noun} of {self.path}: {len(out) - filled} bytes are missing at its end; it was cut "
                    "while it was read",
                    path=str(self.path),
                )
            filled += num

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
