"""Chunks of zarr arrays as bytes: unpacked within the size that they must have, and made of a tensor's box."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import TYPE_CHECKING

import torch
import zstandard

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_ckpt.interop.zarr.nodes import ZarrArray


def chunks_of(array: ZarrArray, box: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yield (index, box of the chunk, beyond the array's end where it is at the edge) of all that a box touches."""
    ranges = [
        range(start // size, (start + count - 1) // size + 1)
        for start, count, size in zip(box.offset, box.shape, array.chunk, strict=True)
    ]
    for index in itertools.product(*ranges):
        yield index, Box(tuple(i * size for i, size in zip(index, array.chunk, strict=True)), array.chunk)


def chunk_bytes(array: ZarrArray) -> int:
    """Return the bytes of every chunk, unpacked."""
    return math.prod(array.chunk) * array.dtype.itemsize


def unpack(data: bytes, array: ZarrArray, what: str) -> bytearray:
    """Return a chunk's bytes, which are exactly as many as its shape takes.

    Raises:
        CorruptionError: they are not; never more than one byte too many is unpacked.
    """
    wanted = chunk_bytes(array)
    for codec in reversed(array.codecs):
        try:
            if codec == "zstd":
                with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                    data = reader.read(wanted + 1)
            else:
                data = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, wanted + 1)
        except (zstandard.ZstdError, zlib.error) as error:
            raise CorruptionError(f"cannot unpack {what}: {error}", path=what) from error
    if len(data) != wanted:
        raise CorruptionError(
            f"cannot read {what}: a chunk has {wanted} bytes, this one {len(data)} or more", path=what
        )
    return bytearray(data)


def padded(part: torch.Tensor, chunk: tuple[int, ...]) -> torch.Tensor:
    """Return a box of a tensor as a whole chunk, zeros beyond the tensor's end."""
    if tuple(part.shape) == chunk:
        return part.contiguous()
    whole = torch.zeros(math.prod(chunk) * part.element_size(), dtype=torch.uint8).view(part.dtype).view(chunk)
    whole[tuple(slice(0, n) for n in part.shape)] = part
    return whole
