"""Regions: tensors that lie in a file as they lie in memory, and reading a box of one with bounded memory.

Nearly every format ends here: a byte offset, a dtype, a shape and strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.stage.raw import as_integers, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable

SPAN_BYTES: Final = 8 << 20
"""What is read at once where wanted elements do not lie one after another."""
_MAX_REPEAT: Final = 16
_SMALL: Final = 1 << 20


class Bytes(Protocol):
    """What can be read at any place: ``Files``, or a packed member seen unpacked."""

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from a file."""


@dataclass(frozen=True, slots=True)
class Region:
    """A strided tensor in a file."""

    file: str
    offset: int
    """Byte of its first element."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, per dim; none negative."""
    big_endian: bool = False
    """The bytes of every number are the other way round."""

    @property
    def span_bytes(self) -> int:
        """From its first byte to the last one that it touches."""
        return span(self.shape, self.strides) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and where it lies."""

    box: Box
    open: Callable[[], Region]
    """Returns the region; what has to be read to find it is read then, once."""


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor whose last index runs fastest."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first to the last one that a strided tensor touches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def check_region(region: Region, start: int, stop: int, what: str) -> Region:
    """Return the region if it lies in the bytes [start, stop) of its file, and repeats them only a little.

    Raises:
        CorruptionError: it does not.
    """
    numel = Box.whole(region.shape).volume
    held = (stop - start) // region.dtype.itemsize
    if (
        len(region.shape) != len(region.strides)
        or min(region.strides, default=0) < 0
        or region.offset < start
        or region.offset + region.span_bytes > stop
        or numel > max(_SMALL, _MAX_REPEAT * held)
    ):
        raise CorruptionError(
            f"cannot read {what}: {region.dtype} {region.shape} with strides {region.strides} at byte {region.offset} "
            f"leaves the {stop - start} bytes from {start} on that it may use of {region.file!r}",
            fqn=what,
        )
    return region


def fill_region(files: Bytes, region: Region, box: Box, out: torch.Tensor) -> None:
    """Fill ``out`` with a box of a region; beside it at most about ``SPAN_BYTES`` are in memory.

    Args:
        files: where the region's file is.
        region: what to read.
        box: in the region's own coordinates.
        out: of the box's shape; any strides.
    """
    if not box.volume:
        return
    item = region.dtype.itemsize
    start = region.offset + item * sum(o * s for o, s in zip(box.offset, region.strides, strict=True))
    steps = [s for n, s in zip(box.shape, region.strides, strict=True) if n > 1]
    sizes = tuple(n for n in box.shape if n > 1)
    num_items = span(sizes, tuple(steps))
    if tuple(steps) == row_major(sizes) and out.is_contiguous() and not region.big_endian:
        files.read_into(region.file, start, memory_of(out.reshape(-1).view(torch.uint8)))
    elif num_items * item <= SPAN_BYTES or not sizes:
        raw = torch.empty(num_items * item, dtype=torch.uint8)
        files.read_into(region.file, start, memory_of(raw))
        if region.big_endian:
            raw = _swapped(raw, region.dtype)
        items = as_integers(raw.view(region.dtype))
        as_integers(out).copy_(items.as_strided(box.shape, region.strides))
    else:
        for part in _parts(box, region):
            fill_region(files, region, part, out[part.relative_to(box).slices])


def _parts(box: Box, region: Region) -> list[Box]:
    """Cut a box along the dim whose neighbours lie farthest apart."""
    dim = max((d for d in range(box.ndim) if box.shape[d] > 1), key=lambda d: region.strides[d])
    step_bytes = max(1, region.strides[dim] * region.dtype.itemsize)
    rows = max(1, min(SPAN_BYTES // step_bytes, -(-box.shape[dim] // 2)))
    parts = []
    for start in range(0, box.shape[dim], rows):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(rows, box.shape[dim] - start)
        parts.append(Box(tuple(offset), tuple(shape)))
    return parts


def _swapped(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    return raw.view(-1, width).flip(1).reshape(-1)
