"""The header of a ``.npy`` file, read as a stranger's: dtype, order and shape, and nothing that would need a pickle."""

from __future__ import annotations

import ast
import math
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.foreign.regions import row_major
from vescale_ckpt.state.dtypes import dtype_from_name

if TYPE_CHECKING:
    import torch

MAGIC: Final = b"\x93NUMPY"
MAX_HEADER_BYTES: Final = 10_000
"""numpy's own limit of what it parses."""
_DESCRIPTION: Final = re.compile(r"([<>|=]?)([biufc])(\d{1,2})")
_KINDS: Final = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a ``.npy`` file says of its array."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    big_endian: bool
    data_start: int
    """Where the array's bytes begin in the file."""

    @property
    def num_bytes(self) -> int:
        """Of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def header_end(first: bytes, what: str) -> int:
    """Return where the header ends, by the first 12 bytes.

    Raises:
        FormatError: it is no ``.npy`` file, or its header is larger than numpy reads.
    """
    version = first[6:8]
    if not first.startswith(MAGIC) or len(first) < 12 or version not in {b"\x01\x00", b"\x02\x00", b"\x03\x00"}:
        raise FormatError(f"cannot read {what}: it is no .npy file", path=what)
    start = 10 if version == b"\x01\x00" else 12
    length = struct.unpack_from("<H" if start == 10 else "<I", first, 8)[0]
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"cannot read {what}: its header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
    return int(start + length)


def parse_npy_header(data: bytes, num_bytes: int, what: str) -> NpyHeader:
    """Return the header of a file.

    Args:
        data: the file up to where the header ends.
        num_bytes: of the whole file.
        what: the file, for messages.

    Raises:
        FormatError: it is no array that torch has: an object, a record, a text.
        CorruptionError: the file does not hold exactly the array.
    """
    fields = _fields(data, what)
    match = _DESCRIPTION.fullmatch(fields["descr"]) if isinstance(fields["descr"], str) else None
    if match is None:
        raise FormatError(
            f"cannot read {what}: its dtype is {str(fields['descr'])[:80]!r}, no plain numbers", path=what
        )
    order, kind, width = match.groups()
    dtype = dtype_from_name("bool" if kind == "b" else f"{_KINDS[kind]}{8 * int(width)}")
    shape = fields["shape"]
    strides = row_major(shape) if not fields["fortran_order"] else row_major(shape[::-1])[::-1]
    header = NpyHeader(dtype, shape, strides, order == ">" and dtype.itemsize > 1, len(data))
    if header.data_start + header.num_bytes != num_bytes:
        raise CorruptionError(
            f"cannot read {what}: {dtype} {shape} takes {header.num_bytes} bytes, {num_bytes - header.data_start} are "
            "there",
            path=what,
        )
    return header


def _fields(data: bytes, what: str) -> dict[str, Any]:
    try:
        fields = ast.literal_eval(data[10 if data[6] == 1 else 12 :].decode("utf-8").strip())
        shape = fields["shape"]
        good = (
            set(fields) == {"descr", "fortran_order", "shape"}
            and type(fields["fortran_order"]) is bool
            and type(shape) is tuple
            and len(shape) <= 64
            and all(type(n) is int and 0 <= n < 2**62 for n in shape)
        )
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise FormatError(f"cannot read {what}: its header is no header: {error!r:.100}", path=what) from error
    if not good:
        raise FormatError(f"cannot read {what}: its header says {str(fields)[:100]}", path=what)
    found: dict[str, Any] = fields
    return found
