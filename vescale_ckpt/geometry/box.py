"""A box: a half-open hyper-rectangle of a tensor's global index space, and the algebra on boxes.

Everything else (tiles, layouts, plans) speaks in boxes. Pure: no torch, no I/O. Several boxes are made for every chunk
of a save and of a load, so the algebra is written with ``map`` where comprehensions would say the same and take twice
the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import add, sub

from vescale_ckpt.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements ``offset[d] <= index[d] < offset[d] + shape[d]``, per dim ``d``.

    A 0-d tensor has the box ``Box((), ())``, which holds one element. A box with a zero in its shape is empty.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            msg = f"box offset {self.offset} has {len(self.offset)} dims, its shape {self.shape} has {len(self.shape)}"
            raise LayoutError(msg)
        if self.shape and (min(self.offset) < 0 or min(self.shape) < 0):
            raise LayoutError(f"box offset {self.offset} shape {self.shape} has a negative number")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """First index past the box, per dim."""
        return tuple(map(add, self.offset, self.shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index a whole tensor with this to get the box."""
        return tuple(map(slice, self.offset, self.end))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part in the shared global coordinates, or None if there is none.

        An empty box never intersects.

        Raises:
            LayoutError: if the boxes differ in number of dims.
        """
        if len(self.shape) != len(other.shape):
            raise LayoutError(f"cannot intersect {self} with {other}: {self.ndim} dims against {other.ndim}")
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(sub, map(min, self.end, other.end), offset))
        return Box(offset, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Box) -> bool:
        """Return whether every element of ``other`` is in this box.

        Raises:
            LayoutError: if the boxes differ in number of dims.
        """
        if len(self.shape) != len(other.shape):
            raise LayoutError(f"cannot compare {self} with {other}: {self.ndim} dims against {other.ndim}")
        if other.volume == 0:
            return True
        return all(
            a <= b and b + t <= a + s
            for a, s, b, t in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def relative_to(self, origin: Box) -> Box:
        """Return this box in coordinates that start at ``origin``'s offset.

        Raises:
            LayoutError: if this box starts before ``origin``, or the boxes differ in number of dims.
        """
        if len(self.shape) != len(origin.shape):
            raise LayoutError(f"cannot place {self} in {origin}: {self.ndim} dims against {origin.ndim}")
        return Box(tuple(map(sub, self.offset, origin.offset)), self.shape)

    def shifted(self, by: tuple[int, ...]) -> Box:
        """Return this box moved by ``by`` elements per dim.

        Raises:
            LayoutError: if it would start below zero, or ``by`` is not one number per dim.
        """
        if len(self.shape) != len(by):
            raise LayoutError(f"cannot move {self} by {by}: {self.ndim} dims against {len(by)}")
        return Box(tuple(map(add, self.offset, by)), self.shape)

    def subtract(self, other: Box) -> list[Box]:
        """Return disjoint boxes that together hold what is in this box and not in ``other``."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.volume else []
        rest: list[Box] = []
        offset, shape = list(self.offset), list(self.shape)
        for d in range(self.ndim):
            before = common.offset[d] - offset[d]
            after = offset[d] + shape[d] - common.end[d]
            if before:
                rest.append(Box(tuple(offset), (*shape[:d], before, *shape[d + 1 :])))
            if after:
                start = (*offset[:d], common.end[d], *offset[d + 1 :])
                rest.append(Box(start, (*shape[:d], after, *shape[d + 1 :])))
            offset[d], shape[d] = common.offset[d], common.shape[d]
        return rest
