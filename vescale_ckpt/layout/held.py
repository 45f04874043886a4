"""What a rank holds, while placements are applied one after another: which indexes of each dim, in which local order.

All placements but the flattening ones cut dims independently, so what is held is, per dim, a list of index ranges that
stand one after another in the local tensor. A flattening one adds ranges of the flattened leading dims to that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.layout.placement import (
    Boxes,
    Flat,
    Interleaved,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
)

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop), ascending, neither empty nor adjacent: what stands one after another in the local tensor."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dims: tuple[Ranges, ...]
    """Per dim, the tensor's indexes that are held."""
    num_folded: int | None = None
    """How many leading dims are flattened into one; None if none was asked to."""
    folded: Ranges = ()
    """Which of the flattened dims' indexes are held, counted in what ``dims`` leaves."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Held:
        """Return the holding of all of a tensor."""
        return cls(shape, tuple(_ranges([(0, n)]) for n in shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many indexes are held per dim, before flattening."""
        return tuple(total(ranges) for ranges in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        if self.num_folded is None:
            return self.sizes
        return (total(self.folded), *self.sizes[self.num_folded :])

    def cut(self, placement: Placement, num: int, position: int) -> Held:
        """Return what is left at a position of an axis of ``num`` positions.

        Raises:
            LayoutError: if the placement does not fit; the message says the reason only.
        """
        match placement:
            case Replicate():
                return self
            case Shard() | StridedShard() | Interleaved():
                dim = self._dim(placement.dim)
                held = self.dims[dim]
                sections = _sections(placement, held, self.shape[dim])
                kept = [part for section in sections for part in _shard_of(placement, section, num, position)]
                return replace(self, dims=(*self.dims[:dim], _ranges(kept), *self.dims[dim + 1 :]))
            case Flat(ranges=ranges):
                return self._flat(*ranges[position])
            case Ragged():
                return self._ragged(placement, position)
            case Boxes():
                return self._box(placement, position)

    def _dim(self, dim: int) -> int:
        ndim = len(self.shape)
        if not -ndim <= dim < ndim:
            raise LayoutError(f"dim {dim} is out of range for {ndim} dims")
        dim %= ndim
        if self.num_folded is not None and dim < self.num_folded:
            raise LayoutError(f"dim {dim} was flattened by a placement before it")
        return dim

    def _flat(self, start: int, stop: int) -> Held:
        numel = math.prod(self.local_shape)
        if stop > numel:
            raise LayoutError(f"range {start}:{stop} is not in the {numel} elements that are cut")
        ndim = len(self.shape)
        if ndim == 1:
            return replace(self, dims=(take(self.dims[0], start, stop),))
        if self.num_folded is None:
            return replace(self, num_folded=ndim, folded=_ranges([(start, stop)]))
        row = math.prod(self.sizes[self.num_folded :])
        flattened = _ranges([(a * row, b * row) for a, b in self.folded])
        return replace(self, num_folded=ndim, folded=take(flattened, start, stop))

    def _ragged(self, ragged: Ragged, position: int) -> Held:
        num = len(ragged.dims)
        if num > len(self.shape):
            raise LayoutError(f"dims {ragged.dims} are out of range for {len(self.shape)} dims")
        if self.num_folded not in {None, num}:
            raise LayoutError("other dims were flattened by a placement before it")
        length, units = math.prod(self.sizes[:num]), sum(ragged.local_units)
        if self.num_folded is not None:
            length = total(self.folded)
        if units == 0 or length % units:
            raise LayoutError(f"the flattened dims have {length} rows, which {units} units do not divide")
        start = sum(ragged.local_units[:position]) * (length // units)
        stop = start + ragged.local_units[position] * (length // units)
        if num == 1:
            return replace(self, dims=(take(self.dims[0], start, stop), *self.dims[1:]))
        before = _ranges([(0, length)]) if self.num_folded is None else self.folded
        return replace(self, num_folded=num, folded=take(before, start, stop))

    def _box(self, boxes: Boxes, position: int) -> Held:
        box = boxes.boxes[position]
        if self.num_folded is not None:
            raise LayoutError("dims were flattened by a placement before it")
        if box.ndim != len(self.shape) or any(e > n for e, n in zip(box.end, self.sizes, strict=True)):
            raise LayoutError(f"{box} is not in the shape {self.sizes} that is cut")
        parts = zip(self.dims, box.offset, box.end, strict=True)
        return replace(self, dims=tuple(take(held, start, stop) for held, start, stop in parts))


def total(ranges: Ranges) -> int:
    """Return how many indexes the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def take(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the part of what the ranges hold that stands at ``start <= position < stop`` in it."""
    taken: list[tuple[int, int]] = []
    at = 0
    for low, high in ranges:
        taken.append((low + max(start - at, 0), min(high, low + stop - at)))
        at += high - low
    return _ranges(taken)


def _ranges(parts: list[tuple[int, int]]) -> Ranges:
    """Return ascending parts without the empty ones, adjacent ones as one."""
    merged: list[tuple[int, int]] = []
    for start, stop in parts:
        if start >= stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _sections(placement: Shard | StridedShard | Interleaved, held: Ranges, size: int) -> list[Ranges]:
    """Return the sections of a dim that are sharded each by itself."""
    match placement:
        case Shard():
            return [held]
        case StridedShard(split_factor=num):
            return [take(held, *_chunk(total(held), num, i)) for i in range(num)]
        case Interleaved(groups=groups):
            if sum(groups) != size:
                raise LayoutError(f"the groups add up to {sum(groups)}, dim {placement.dim} has {size}")
            ends = [sum(groups[: i + 1]) for i in range(len(groups))]
            return [
                _ranges([(max(low, end - group), min(high, end)) for low, high in held])
                for group, end in zip(groups, ends, strict=True)
            ]


def _shard_of(placement: Shard | StridedShard | Interleaved, section: Ranges, num: int, position: int) -> Ranges:
    """Return the part of a section that a position holds."""
    length = total(section)
    if isinstance(placement, Shard) and placement.sizes is not None:
        if sum(placement.sizes) != length:
            raise LayoutError(
                f"the sizes add up to {sum(placement.sizes)}, what is cut of dim {placement.dim} has {length}"
            )
        start = sum(placement.sizes[:position])
        return take(section, start, start + placement.sizes[position])
    return take(section, *_chunk(length, num, position))


def _chunk(length: int, num: int, position: int) -> tuple[int, int]:
    """Return the range of ``torch.chunk``'s part at a position; the last parts may be short or empty."""
    step = -(-length // num)
    return min(position * step, length), min((position + 1) * step, length)
