"""Proof that boxes cover a tensor: every element exactly once, or a report of where not.

A commit rests on it, so it is exact; a checkpoint of a large model has millions of chunks, so it is vectorised and
never compares all boxes with all.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]

DEFAULT_LIMIT = 100
"""How many missing boxes, and how many overlapping pairs, a report names if not told otherwise."""

_MIN_CELLS = 1 << 14
"""A region of so few cells is always counted at once; see ``CoverFinder``."""
_CELLS_PER_BOX = 16
_MIN_CORNERS = 1 << 22


@dataclass(frozen=True, slots=True)
class CoverReport:
    """What is wrong with a cover: all of it, unless ``truncated``."""

    missing: tuple[Box, ...] = ()
    """Disjoint boxes that nothing covers, in order of offset."""
    overlaps: tuple[tuple[int, int], ...] = ()
    """Pairs (lower, higher) of positions, in the sequence or rows that were checked, that share elements."""
    outside: tuple[int, ...] = ()
    """Positions of boxes that do not lie where they should: in the tensor or, for a partial chunk, in its tile."""
    truncated: bool = False
    """There is more that is wrong than the limit allows to name."""

    @property
    def ok(self) -> bool:
        """Whether every element is covered exactly once and nothing lies outside."""
        return not (self.missing or self.overlaps or self.outside)


def check_cover(shape: tuple[int, ...], boxes: Sequence[Box], *, limit: int = DEFAULT_LIMIT) -> CoverReport:
    """Return whether ``boxes`` cover a tensor of ``shape`` exactly once, and where not.

    An empty box covers nothing, overlaps nothing and may be anywhere.

    Raises:
        LayoutError: if a box has another number of dims than the tensor, or a dim has 2^63 elements or more.
    """
    if any(n >= 1 << 63 for n in shape):
        raise LayoutError(f"cannot check the cover of shape {shape}: a dim has 2^63 elements or more")
    outside: list[int] = []
    rows: list[int] = []
    for i, box in enumerate(boxes):
        if box.ndim != len(shape):
            raise LayoutError(f"{box} has {box.ndim} dims, the tensor to be covered has the shape {shape}")
        if box.volume == 0:
            continue
        inside = all(o + s <= n for o, s, n in zip(box.offset, box.shape, shape, strict=True))
        (rows if inside else outside).append(i)
    lows = np.array([boxes[i].offset for i in rows], np.int64).reshape(len(rows), len(shape))
    sizes = np.array([boxes[i].shape for i in rows], np.int64).reshape(len(rows), len(shape))
    finder = CoverFinder(limit)
    finder.check(Box.whole(shape), lows, lows + sizes, np.array(rows, np.int64))
    return finder.report(outside)


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of the tensor and the boxes in it, clipped to it."""

    low: Int64s  # [ndim]
    high: Int64s  # [ndim]
    lows: Int64s  # [n, ndim]
    highs: Int64s  # [n, ndim]
    rows: Int64s  # [n] who they are

    def box(self) -> Box:
        return Box(tuple(self.low.tolist()), tuple((self.high - self.low).tolist()))

    def halves(self, dim: int, at: int) -> tuple[_Region, _Region]:
        """Cut the region, and the boxes that lie across, in two at an index of a dim."""
        left, right = self.lows[:, dim] < at, self.highs[:, dim] > at
        left_high, right_low = self.high.copy(), self.low.copy()
        left_high[dim] = right_low[dim] = at
        left_highs, right_lows = self.highs[left], self.lows[right]
        np.minimum(left_highs[:, dim], at, out=left_highs[:, dim])
        np.maximum(right_lows[:, dim], at, out=right_lows[:, dim])
        return (
            _Region(self.low, left_high, self.lows[left], left_highs, self.rows[left]),
            _Region(right_low, self.high, right_lows, self.highs[right], self.rows[right]),
        )


@dataclass(slots=True)
class CoverFinder:
    """Finds what is wrong with covers, up to a limit; may be given several regions one after another.

    The edges of the boxes cut a region into cells that are covered alike. Where they are few, all are counted at once
    (a difference array and its running sums). Where they are many, the region is cut at the median edge and each half
    goes the same way: boxes that tile a tensor meet few cuts, so this costs about n log n.
    """

    limit: int = DEFAULT_LIMIT
    missing: list[Box] = field(default_factory=list)
    overlaps: set[tuple[int, int]] = field(default_factory=set)

    @property
    def full(self) -> bool:
        """Whether more was found than may be named; what is left is then not looked at."""
        return len(self.missing) > self.limit or len(self.overlaps) > self.limit

    def add_missing(self, boxes: Iterable[Box]) -> None:
        """Note boxes that nothing covers, as far as the limit allows."""
        self.missing.extend(itertools.islice(boxes, max(self.limit + 1 - len(self.missing), 0)))

    def check(self, region: Box, lows: Int64s, highs: Int64s, rows: Int64s) -> None:
        """Find what is wrong in a region with the boxes ``lows <= index < highs``, which lie in it and are not empty.

        ``rows`` says what positions to report the boxes by.
        """
        if region.volume == 0:
            return
        start = np.array(region.offset, np.int64)
        todo = [_Region(start, start + np.array(region.shape, np.int64), lows, highs, rows)]
        while todo and not self.full:
            part = todo.pop()
            if len(part.rows) == 0:
                self.add_missing([part.box()])
                continue
            cuts = [
                np.unique(
                    np.concatenate([part.lows[:, d], part.highs[:, d], part.low[d : d + 1], part.high[d : d + 1]])
                )
                for d in range(region.ndim)
            ]
            num_cells = math.prod(len(c) - 1 for c in cuts)
            num_corners = len(part.rows) << sum(len(c) > 2 for c in cuts)
            if num_cells <= max(_MIN_CELLS, _CELLS_PER_BOX * len(part.rows)) and num_corners <= max(
                _MIN_CORNERS, 64 * len(part.rows)
            ):
                self._count(part, cuts)
            else:
                dim = max(range(region.ndim), key=lambda d: len(cuts[d]))
                todo.extend(part.halves(dim, int(cuts[dim][len(cuts[dim]) // 2])))

    def report(self, outside: Sequence[int] = ()) -> CoverReport:
        """Return what was found, cut to the limit."""
        return CoverReport(
            missing=tuple(sorted(self.missing)[: self.limit]),
            overlaps=tuple(sorted(self.overlaps)[: self.limit]),
            outside=tuple(sorted(outside)[: self.limit]),
            truncated=self.full or len(outside) > self.limit,
        )

    def _count(self, part: _Region, cuts: list[Int64s]) -> None:
        """Count how often each cell of the region is covered and note where it is not once."""
        # Dims of a single cell have no say, and leaving them out keeps the corners few.
        dims = [d for d, c in enumerate(cuts) if len(c) > 2]
        first = [np.searchsorted(cuts[d], part.lows[:, d]) for d in dims]
        last = [np.searchsorted(cuts[d], part.highs[:, d]) for d in dims]
        deltas = np.zeros([len(cuts[d]) for d in dims], np.int64)
        for corner in itertools.product((0, 1), repeat=len(dims)):
            at = tuple((first[k], last[k])[c] for k, c in enumerate(corner))
            np.add.at(deltas, at, (-1) ** sum(corner) if at else len(part.rows))
        counts = np.asarray(_running_sums(deltas)[tuple(slice(-1) for _ in dims)])
        if (counts == 1).all():
            return
        absent = counts == 0
        for low, high in _cells_as_boxes(absent, self.limit + 1 - len(self.missing)):
            offset, end = part.low.copy(), part.high.copy()
            for k, d in enumerate(dims):
                offset[d], end[d] = cuts[d][low[k]], cuts[d][high[k]]
            self.add_missing([Box(tuple(offset.tolist()), tuple((end - offset).tolist()))])
        twice = np.zeros(deltas.shape, np.int64)
        twice[tuple(slice(1, None) for _ in dims)] = _running_sums((counts > 1).astype(np.int64))
        touching = np.zeros(len(part.rows), np.int64)
        for corner in itertools.product((0, 1), repeat=len(dims)):
            at = tuple((last[k], first[k])[c] for k, c in enumerate(corner))
            touching += (-1) ** sum(corner) * twice[at]
        self._pair_up(part, np.flatnonzero(touching))

    def _pair_up(self, part: _Region, touching: Int64s) -> None:
        """Note the pairs among boxes of which each overlaps some other; ends once the limit is passed."""
        lows, highs, rows = part.lows[touching], part.highs[touching], part.rows[touching]
        for i in range(len(touching)):
            if len(self.overlaps) > self.limit:
                return
            others = ((lows[i] < highs[i + 1 :]) & (lows[i + 1 :] < highs[i])).all(axis=1)
            row = int(rows[i])
            room = self.limit + 1
            self.overlaps.update((min(row, r), max(row, r)) for r in rows[i + 1 :][others][:room].tolist())


def _running_sums(cells: Int64s) -> Int64s:
    """Return the sums over all cells at or before each one along every dim."""
    for d in range(cells.ndim):
        cells = cells.cumsum(axis=d)
    return cells


def _cells_as_boxes(cells: npt.NDArray[np.bool_], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield disjoint boxes (low, high) that hold the true cells, each grown from its first cell as far as it goes."""
    rest = cells.copy()
    flat = rest.reshape(-1)
    at = 0
    for _ in range(limit):
        at += int(flat[at:].argmax())
        if not flat[at]:
            return
        low = tuple(int(i) for i in np.unravel_index(at, rest.shape))
        high = [i + 1 for i in low]
        for d in reversed(range(rest.ndim)):
            window = tuple(slice(lo, hi) for lo, hi in zip(low, high, strict=True))
            along = rest[(*window[:d], slice(low[d], None), *window[d + 1 :])]
            usable = np.asarray(along.all(axis=tuple(k for k in range(rest.ndim) if k != d)))
            high[d] = low[d] + (len(usable) if usable.all() else int(usable.argmin()))
        rest[tuple(slice(lo, hi) for lo, hi in zip(low, high, strict=True))] = False
        yield low, tuple(high)
