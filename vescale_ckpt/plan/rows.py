"""Rows of boxes: all ranks' boxes as columns, so that planning for thousands of ranks is sorting and not looping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BoxRows:
    """One row for each box that a rank holds; dims beyond a tensor's own are offset 0, size 1."""

    rank: npt.NDArray[np.int64]  # [num_rows]
    tensor: npt.NDArray[np.int64]  # [num_rows]
    offset: npt.NDArray[np.int64]  # [num_rows, max_ndim]
    size: npt.NDArray[np.int64]  # [num_rows, max_ndim]
    ndim: npt.NDArray[np.int64]  # [num_tensors]

    @property
    def volume(self) -> npt.NDArray[np.int64]:
        """Elements of each row's box."""
        volumes: npt.NDArray[np.int64] = self.size.prod(axis=1)
        return volumes

    def ndim_of(self, tensor: int) -> int:
        """Return a tensor's number of dims."""
        return int(self.ndim[tensor])

    def box(self, row: int) -> Box:
        """Return one row's box."""
        n = self.ndim_of(int(self.tensor[row]))
        return Box(tuple(int(x) for x in self.offset[row, :n]), tuple(int(x) for x in self.size[row, :n]))


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows grouped by equal (tensor, box); sorted by tensor."""

    first: npt.NDArray[np.int64]  # [num_groups] a row of the group, of its lowest rank
    size: npt.NDArray[np.int64]  # [num_groups] number of ranks that hold the box
    order: npt.NDArray[np.int64]  # [num_rows] all rows, group after group, by rank within a group
    start: npt.NDArray[np.int64]  # [num_groups] where in ``order`` a group begins
    tensor: npt.NDArray[np.int64]  # [num_groups]

    def slice_of(self, tensor: int) -> slice:
        """Return which groups are of one tensor."""
        begin, end = np.searchsorted(self.tensor, [tensor, tensor + 1])
        return slice(int(begin), int(end))

    def replica_sets(self, rows: BoxRows) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield (ranks, groups that exactly these ranks hold) for each set of two or more, smaller sets first.

        Sets with few members have the least freedom, so they go first and the larger ones level out what they leave.
        """
        many = np.flatnonzero(self.size > 1)
        if not many.size:
            return
        # A set of ranks is known by the sum of one fixed 64-bit word per rank (Zobrist hashing).
        words = np.random.default_rng(20260101).integers(0, 2**63, size=int(rows.rank.max()) + 1, dtype=np.uint64)
        sums = np.add.reduceat(words[rows.rank[self.order]], self.start)[many]
        _, inverse = np.unique(sums, return_inverse=True)
        by_set = np.argsort(inverse, kind="stable")
        cuts = np.flatnonzero(np.diff(inverse[by_set])) + 1
        sets = [many[part] for part in np.split(by_set, cuts)]
        for chosen in sorted(sets, key=lambda groups: (int(self.size[groups[0]]), int(groups[0]))):
            g = int(chosen[0])
            members = rows.rank[self.order[self.start[g] : self.start[g] + self.size[g]]]
            yield members, chosen


def gather_rows(
    columns: Sequence[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]],
    ndim: npt.NDArray[np.int64],
) -> BoxRows:
    """Return all ranks' boxes as rows.

    Args:
        columns: per rank: its number, the tensor index of each of its specs, how many boxes it holds of each, and the
            flat box values (per box ndim offsets, then ndim sizes).
        ndim: dims of each tensor.
    """
    width = max(1, int(ndim.max(initial=0)))
    ranks, tensors, offsets, sizes = [], [], [], []
    dims = np.arange(width)
    for rank, spec_tensor, counts, values in columns:
        tensor = np.repeat(spec_tensor, counts)
        n = ndim[tensor]
        start = np.cumsum(2 * n) - 2 * n
        real = dims < n[:, None]
        padded = np.append(values, 0)
        at = np.where(real, start[:, None] + dims, len(values))
        offsets.append(padded[at])
        at = np.where(real, start[:, None] + n[:, None] + dims, len(values))
        sizes.append(np.where(real, padded[at], 1))
        tensors.append(tensor)
        ranks.append(np.full(len(tensor), rank, dtype=np.int64))
    return BoxRows(np.concatenate(ranks), np.concatenate(tensors), np.concatenate(offsets), np.concatenate(sizes), ndim)


def group_equal(rows: BoxRows) -> Groups:
    """Return the rows grouped by equal tensor and box; empty boxes are left out."""
    live = np.flatnonzero(rows.volume > 0)
    columns = [rows.rank[live]]
    columns += [rows.size[live, d] for d in reversed(range(rows.size.shape[1]))]
    columns += [rows.offset[live, d] for d in reversed(range(rows.offset.shape[1]))]
    columns.append(rows.tensor[live])
    order = live[np.lexsort(columns)]
    if not order.size:
        empty = np.empty(0, dtype=np.int64)
        return Groups(empty, empty, empty, empty, empty)
    new = np.ones(order.size, dtype=bool)
    new[1:] = rows.tensor[order[1:]] != rows.tensor[order[:-1]]
    new[1:] |= (rows.offset[order[1:]] != rows.offset[order[:-1]]).any(axis=1)
    new[1:] |= (rows.size[order[1:]] != rows.size[order[:-1]]).any(axis=1)
    keep = new | (np.diff(rows.rank[order], prepend=-1) != 0)  # a rank that holds a box twice counts once
    order, new = order[keep], new[keep]
    start = np.flatnonzero(new)
    return Groups(order[start], np.diff(np.append(start, order.size)), order, start, rows.tensor[order[start]])
