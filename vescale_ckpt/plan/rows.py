"""Rows of boxes: all ranks' boxes as columns, so that planning for thousands of ranks is sorting and not looping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import FormatError
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
        return self.volumes(slice(None))

    def volumes(self, rows: npt.NDArray[np.int64] | slice) -> npt.NDArray[np.int64]:
        """Return the elements of some rows' boxes."""
        volumes = self.size[rows, 0].copy()
        for dim in range(1, self.size.shape[1]):
            volumes *= self.size[rows, dim]
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
    """Return all ranks' boxes as rows, rank after rank.

    Args:
        columns: per rank: its number, the tensor index of each of its specs, how many boxes it holds of each, and the
            flat box values (per box ndim offsets, then ndim sizes).
        ndim: dims of each tensor.

    Raises:
        FormatError: a rank sent another number of values than its boxes have.
    """
    width = max(1, int(ndim.max(initial=0)))
    specs = np.concatenate([spec_tensor for _, spec_tensor, _, _ in columns])
    counts = np.concatenate([held for _, _, held, _ in columns])
    num_rows = [int(held.sum()) for _, _, held, _ in columns]
    tensor = np.repeat(specs, counts)
    n = ndim[tensor]
    ends = np.cumsum(2 * n)
    _check_lengths(columns, num_rows, ends)
    start = ends - 2 * n
    values = np.concatenate([*(flat for _, _, _, flat in columns), np.zeros(1, dtype=np.int64)])
    absent = len(values) - 1
    offset = np.empty((width, len(tensor)), dtype=np.int64)  # all that follows goes dim by dim
    size = np.empty_like(offset)
    for dim in range(width):
        real = n > dim
        if real.all():
            offset[dim], size[dim] = values[start + dim], values[start + n + dim]
        else:
            offset[dim] = values[np.where(real, start + dim, absent)]
            size[dim] = np.where(real, values[np.where(real, start + n + dim, absent)], 1)
    rank = np.repeat(np.array([r for r, _, _, _ in columns], dtype=np.int64), num_rows)
    return BoxRows(rank, tensor, offset.T, size.T, ndim)


def _check_lengths(
    columns: Sequence[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]],
    num_rows: Sequence[int],
    ends: npt.NDArray[np.int64],
) -> None:
    """Refuse a rank that sent more or fewer values than its boxes have; the next ranks' would be taken for its own."""
    last = np.cumsum(num_rows)
    expected = np.diff(np.concatenate([[0], ends])[last], prepend=0)
    for (rank, _, _, flat), wanted in zip(columns, expected.tolist(), strict=True):
        if len(flat) != wanted:
            raise FormatError(f"cannot plan: rank {rank} sent {len(flat)} numbers for boxes that have {wanted}")


def group_equal(rows: BoxRows) -> Groups:
    """Return the rows grouped by equal tensor and box; empty boxes are left out."""
    live = np.flatnonzero(rows.volume > 0)
    order = _sorted(rows, live)
    if not order.size:
        empty = np.empty(0, dtype=np.int64)
        return Groups(empty, empty, empty, empty, empty)
    new = np.ones(order.size, dtype=bool)
    same = np.ones(order.size - 1, dtype=bool)
    for column in (rows.tensor, *rows.offset.T, *rows.size.T):
        sorted_column = column[order]
        same &= sorted_column[1:] == sorted_column[:-1]
    new[1:] = ~same
    keep = new | (np.diff(rows.rank[order], prepend=-1) != 0)  # a rank that holds a box twice counts once
    if not keep.all():
        order, new = order[keep], new[keep]
    start = np.flatnonzero(new)
    return Groups(order[start], np.diff(np.append(start, order.size)), order, start, rows.tensor[order[start]])


def _sorted(rows: BoxRows, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ``live`` rows by tensor, offset, size and rank.

    Tensor and offset mostly fit into one 64-bit number, which sorts several times faster than columns do; the sort is
    stable, so ranks stay in order, and boxes with one offset have one size unless they overlap.
    """
    keys = [rows.tensor[live], *(column[live] for column in rows.offset.T)]
    bits = [int(key.max(initial=0)).bit_length() for key in keys]
    if sum(bits) < 64 and bool((np.diff(rows.rank[live]) >= 0).all()):
        packed = keys[0]
        for key, width in zip(keys[1:], bits[1:], strict=True):
            packed = packed << width | key if width else packed
        order = np.argsort(packed, kind="stable")
        packed, by_key = packed[order], live[order]
        tied = np.flatnonzero(packed[1:] == packed[:-1])
        if all(bool((column[by_key[tied]] == column[by_key[tied + 1]]).all()) for column in rows.size.T):
            return by_key
    sizes = [column[live] for column in rows.size.T]
    return live[np.lexsort([rows.rank[live], *reversed(sizes), *reversed(keys)])]


def water_levels(loads: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """Return how many of ``total`` bytes each member takes so that the lowest of its ``loads`` rise to one level."""
    order = np.sort(loads)
    room = order * np.arange(1, len(order) + 1) - np.cumsum(order)  # bytes that lift all lower ones to order[i]
    full = int(np.searchsorted(room, total, side="right"))
    level = -(-(total + int(order[:full].sum())) // full)
    return np.maximum(level - loads, 0)
