"""Target: one numpy ``.npz`` file."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import torch

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.interop.convert.files import Layout, tensor_parts
from vescale_ckpt.interop.convert.to_torch_save import ArchiveFile
from vescale_ckpt.interop.convert.zips import ZipLayout, ZipMember

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vescale_ckpt.interop.convert.options import ConvertOptions
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor
    from vescale_storage.backend import Buffer

DESCRIPTIONS: Final[dict[torch.dtype, str]] = {
    torch.bool: "|b1", torch.uint8: "|u1", torch.int8: "|i1", torch.uint16: "<u2", torch.int16: "<i2",
    torch.uint32: "<u4", torch.int32: "<i4", torch.uint64: "<u8", torch.int64: "<i8", torch.float16: "<f2",
    torch.float32: "<f4", torch.float64: "<f8", torch.complex64: "<c8", torch.complex128: "<c16",
}  # fmt: skip
"""What numpy calls the dtypes that it has; it knows neither bfloat16 nor any 8-bit float."""
_ALIGN: Final = 64


def npy_header(description: str, shape: tuple[int, ...]) -> bytes:
    """Return the first bytes of a ``.npy`` file, version 2, up to the array's."""
    text = f"{{'descr': '{description}', 'fortran_order': False, 'shape': {shape!r}, }}".encode("ascii")
    text += b" " * (-(len(text) + 13) % _ALIGN) + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text


def lay_out(source: ForeignSnapshot, options: ConvertOptions) -> Layout:
    """Return the one file. Tied tensors are written under every name: the format has no ties.

    Raises:
        InvalidInputError: a tensor has a dtype that numpy does not have.
    """
    tensors = source.tensors()
    odd = [f"{name[:80]!r} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DESCRIPTIONS]
    if odd:
        raise InvalidInputError(
            f"cannot convert {source.url} to .npz: numpy has no such dtypes: {', '.join(odd[:5])}"
            + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
            + "; cast them with a key map",
            problems=tuple(odd),
        )
    members = [_member(source, tensor, options.part_bytes) for tensor in tensors.values()]
    left_out = [(name, "a plain value") for name in source.values]
    return Layout([ArchiveFile(options.file_name or "model.npz", ZipLayout(members))], left_out=left_out)


def _member(source: ForeignSnapshot, tensor: ForeignTensor, max_bytes: int) -> ZipMember:
    header = npy_header(DESCRIPTIONS[tensor.dtype], tensor.shape)

    def parts() -> Iterator[Callable[[], Buffer]]:
        yield lambda: header
        yield from tensor_parts(source, tensor, max_bytes)

    return ZipMember(f"{tensor.name}.npy", len(header) + tensor.num_bytes, parts)
