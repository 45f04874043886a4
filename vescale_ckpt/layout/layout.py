"""A layout: how a mesh of ranks holds one tensor; which boxes of it a rank holds, and where in its local memory.

Pure arithmetic: rank, mesh and coordinate are arguments, so a reshard over thousands of ranks is a loop in a test.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.flat import flat_to_boxes
from vescale_ckpt.layout.held import Held, Ranges
from vescale_ckpt.layout.mesh import check_coordinate
from vescale_ckpt.layout.placement import (
    Interleaved,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    num_positions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """How a mesh holds a tensor: one placement per mesh axis, applied one after another.

    Each placement cuts what those before it have left, so the order is part of the layout. Without ``order`` it is that
    of the axes, left to right, unless there is a ``StridedShard``. Torch writes that where the axes were applied in
    another order: FSDP2 over tensor parallelism on one dim is ``(_StridedShard(0, tp), Shard(0))`` on a mesh
    ``(dp, tp)``, and the tensor was cut over ``tp`` first and then over ``dp``. As torch does when it gathers such a
    tensor, the split factors are read back into that order where they can be; a layout whose factors say no order is
    applied left to right, to the letter. The two readings are the same where everything divides. Where it does not,
    only the first is what FSDP2's memory holds.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    order: tuple[int, ...] | None = None
    """Mesh axes in the order in which their placements apply; then each, a ``StridedShard`` too, is taken to the
    letter."""

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh_shape):
            found = f"{len(self.placements)} placements {self.placements}"
            raise LayoutError(f"a mesh {self.mesh_shape} of {len(self.mesh_shape)} axes comes with {found}")
        if any(size < 1 for size in self.mesh_shape):
            raise LayoutError(f"mesh {self.mesh_shape} has an axis without ranks")
        for axis, (size, placement) in enumerate(zip(self.mesh_shape, self.placements, strict=True)):
            if num_positions(placement) not in {None, size}:
                found = f"which is for {num_positions(placement)} ranks"
                raise LayoutError(f"axis {axis} of mesh {self.mesh_shape} has {placement}, {found}")
        if self.order is not None and sorted(self.order) != list(range(len(self.mesh_shape))):
            raise LayoutError(f"order {self.order} does not name every axis of mesh {self.mesh_shape} once")

    def replica_of(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first coordinate that holds the same as this one because an axis replicates."""
        pairs = zip(coordinate, self.placements, strict=True)
        return tuple(0 if isinstance(placement, Replicate) else at for at, placement in pairs)


@dataclass(frozen=True, slots=True)
class Span:
    """A box that a rank holds, and where in its local tensor.

    The local place needs no copy to reach: the elements of the contiguous local tensor from ``view_start`` on, seen as
    an array of ``view_shape``, hold the box at ``local``. Where no placement flattens, that array is the local tensor
    itself, whatever its strides.
    """

    box: Box
    """In the whole tensor."""
    local: Box
    """In the array of ``view_shape``; as large as ``box``."""
    view_shape: tuple[int, ...]
    """As many dims as the whole tensor."""
    view_start: int = 0
    """In elements of the row-major local tensor."""

    @property
    def view_stop(self) -> int:
        """First element past the array of ``view_shape``."""
        return self.view_start + math.prod(self.view_shape)

    def view_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the part of a local tensor that holds the box, as a view of the same memory."""
        if tuple(local.shape) != self.view_shape:
            local = local.view(-1)[self.view_start : self.view_stop].view(self.view_shape)
        if self.local.shape == tuple(local.shape):
            return local
        return local[self.local.slices]


def spans(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Span, ...]:
    """Return what the rank at a coordinate holds, in the order of its local memory; nothing if it holds no element.

    The boxes are disjoint, and as few as the ranges of each dim allow.

    Raises:
        LayoutError: if mesh, placements, shape and coordinate do not fit together.
    """
    held = _hold(layout, global_shape, coordinate)
    if 0 in held.local_shape:
        return ()
    return tuple(_spans(held))


def local_shape(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the local tensor at a coordinate, padding excluded.

    Raises:
        LayoutError: if mesh, placements, shape and coordinate do not fit together.
    """
    return _hold(layout, global_shape, coordinate).local_shape


def _hold(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Held:
    """Apply the placements in their order."""
    check_coordinate(layout.mesh_shape, coordinate)
    if any(n < 0 for n in global_shape):
        raise LayoutError(f"shape {global_shape} has a negative size")
    held = Held.whole(global_shape)
    for axis, placement in _steps(layout, len(global_shape)):
        try:
            held = held.cut(placement, layout.mesh_shape[axis], coordinate[axis])
        except LayoutError as error:
            where = f"placements {layout.placements} on mesh {layout.mesh_shape}, axis {axis}"
            raise LayoutError(f"cannot lay out shape {global_shape} by {where}: {error.message}") from error
    return held


@functools.lru_cache(maxsize=1024)
def _steps(layout: Layout, ndim: int) -> tuple[tuple[int, Placement], ...]:
    """Return (axis, placement) in the order in which they apply."""
    axes = tuple(range(len(layout.mesh_shape)))
    placements = layout.placements
    order = layout.order
    if order is None and any(isinstance(p, StridedShard) for p in placements):
        order = _decode_order(layout, ndim)
        if order is not None:
            placements = tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements)
    return tuple((axis, placements[axis]) for axis in (axes if order is None else order))


def _decode_order(layout: Layout, ndim: int) -> tuple[int, ...] | None:
    """Return the order of axes that the split factors tell, or None if they tell none.

    A split factor is the product of the sizes of those axes to the right that cut the same dim earlier. From right to
    left, each axis goes after as many of the axes already in order as multiply to its factor.
    """
    by_dim: dict[int, list[int]] = {}
    rest: list[int] = []
    for axis in reversed(range(len(layout.placements))):
        placement = layout.placements[axis]
        if isinstance(placement, Replicate):
            rest.append(axis)
            continue
        if not isinstance(placement, Shard | StridedShard | Interleaved) or not -ndim <= placement.dim < ndim:
            return None
        in_order = by_dim.setdefault(placement.dim % ndim, [])
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        products = list(itertools.accumulate((layout.mesh_shape[a] for a in in_order), initial=1, func=int.__mul__))
        if factor not in products:
            return None
        in_order.insert(products.index(factor), axis)
    # Cuts of different dims do not meet, so any merge of the dims' orders is the same.
    return (*(axis for in_order in by_dim.values() for axis in in_order), *rest)


def _spans(held: Held) -> Iterator[Span]:
    """Yield the spans of a held that is not empty."""
    if held.num_folded is None:
        yield from _spans_in(held, Box.whole(held.sizes), 0)
        return
    num = held.num_folded
    leading, trailing = held.sizes[:num], held.sizes[num:]
    start = 0
    for low, high in held.folded:
        for box in flat_to_boxes(leading, low, high):
            part = Box((*box.offset, *(0,) * len(trailing)), (*box.shape, *trailing))
            yield from _spans_in(held, part, start)
            start += part.volume


def _spans_in(held: Held, part: Box, view_start: int) -> Iterator[Span]:
    """Yield the spans of a box of what ``held.dims`` leaves; it is contiguous in memory, from ``view_start`` on."""
    per_dim = [
        list(_pieces(ranges, start, stop)) for ranges, start, stop in zip(held.dims, part.offset, part.end, strict=True)
    ]
    for pieces in itertools.product(*per_dim):
        sizes = tuple(piece[2] for piece in pieces)
        box = Box(tuple(piece[0] for piece in pieces), sizes)
        yield Span(box, Box(tuple(piece[1] for piece in pieces), sizes), part.shape, view_start)


def _pieces(ranges: Ranges, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index in the tensor, position after ``start``, length) of what stands at ``start`` to ``stop``."""
    at = 0
    for low, high in ranges:
        first, last = max(start, at), min(stop, at + high - low)
        if first < last:
            yield low + first - at, first - start, last - first
        at += high - low
