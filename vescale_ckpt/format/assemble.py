"""From the fragments of all ranks to the tables of one manifest, column by column.

What the ranks must agree on is checked first; that the chunks cover every tensor exactly once is asked of the table
that comes out, by ``geometry.tile_cover``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.format.checks import TensorShapes, check_chunks, partial_starts, refuse_rows, tile_boxes
from vescale_ckpt.format.records import ChunkTable, PackRecord
from vescale_ckpt.state.keys import place
from vescale_ckpt.state.merge import format_ranks, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.fragment import Fragment
    from vescale_ckpt.format.records import TensorRecord

    Int64s = npt.NDArray[np.int64]

WHAT: Final = "table of all ranks' chunks"
_MAX_SIDES: Final = 8


def check_agreement(fragments: Sequence[Fragment], tensors: Sequence[TensorRecord], world_size: int) -> None:
    """Refuse fragments that are not one of every rank, of one plan, and with equal copies of what is replicated.

    Raises:
        MismatchError: ``problems`` lists all that differs, with the ranks on each side.
    """
    problems = []
    count = Counter(fragment.rank for fragment in fragments)
    if missing := set(range(world_size)).difference(count):
        problems.append(f"{format_ranks(missing)} of {world_size} reported nothing")
    if surplus := [rank for rank, times in count.items() if times > 1 or rank >= world_size]:
        problems.append(f"{format_ranks(surplus)} reported twice or is none of {world_size} ranks")
    by_key: dict[bytes, list[int]] = {}
    for fragment in fragments:
        by_key.setdefault(fragment.plan_key, []).append(fragment.rank)
    if len(by_key) > 1:
        problems.append(f"the ranks followed different plans: {_sides(by_key)}")
    problems += _different_replicas(fragments, tensors)
    if problems:
        raise mismatch("cannot commit: the ranks do not agree", problems)


def _different_replicas(fragments: Sequence[Fragment], tensors: Sequence[TensorRecord]) -> list[str]:
    """Return a line for each tensor of which two ranks have different copies."""
    by_tensor: dict[int, dict[bytes, list[int]]] = {}
    for fragment in fragments:
        for tensor, digest in fragment.replicas.items():
            by_tensor.setdefault(tensor, {}).setdefault(digest, []).append(fragment.rank)
    if beyond := [tensor for tensor in by_tensor if tensor >= len(tensors)]:
        raise CorruptionError(f"cannot use the fragments: a replica of tensor {beyond[0]} of {len(tensors)}")
    return [
        f"{place(tensors[tensor].path)}: the copies differ: {_sides(copies)}"
        for tensor, copies in sorted(by_tensor.items())
        if len(copies) > 1
    ]


def _sides(ranks_by_digest: dict[bytes, list[int]]) -> str:
    sides = list(ranks_by_digest.items())
    shown = [f"{format_ranks(ranks)}: {digest.hex()[:12]}" for digest, ranks in sides[:_MAX_SIDES]]
    return "; ".join([*shown, *([f"... ({len(sides)} different ones)"] if len(sides) > _MAX_SIDES else [])])


def assemble(
    fragments: Sequence[Fragment], tensors: Sequence[TensorRecord]
) -> tuple[ChunkTable, tuple[PackRecord, ...]]:
    """Return the chunk table and the pack table of all fragments.

    Rows are sorted by tensor, tile and, within a tile, the first element of the part; packs by name, only those that a
    chunk is in. So the outcome does not depend on the order of the fragments. A part that is all of its tile becomes a
    whole tile.

    Raises:
        CorruptionError: a fragment has a chunk of no tensor, of an alias, of no tile, or one that is not in its tile;
            or two fragments give a pack different sizes. Names the rank.
    """
    if not fragments:
        return ChunkTable.empty(len(tensors)), ()
    shapes = TensorShapes.of(tensors)
    starts = np.cumsum([0, *(len(fragment.chunks) for fragment in fragments)])
    column = {
        name: np.concatenate([getattr(fragment.chunks, name) for fragment in fragments])
        for name in ("tensor", "tile", "digest", "offset", "length", "codec")
    }
    tensor = column.pop("tensor").astype(np.int64)
    try:
        refuse_rows(tensor >= len(tensors), WHAT, f"is of a tensor beyond the {len(tensors)} of the plan")
        refuse_rows(column["tile"] >= shapes.num_tiles[tensor], WHAT, "is of a tile that its tensor does not have")
        parts = _Parts.of(fragments, starts, tensor, shapes)
        parts = parts.without_whole_tiles(tensor, column["tile"], shapes)
    except CorruptionError as error:
        raise _of_rank(error, error.context["row"], fragments, starts) from error
    pack, packs = _unite_packs(fragments)

    order = _order(tensor, column["tile"], parts, shapes)
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    parts = parts.moved(place_of)
    table = ChunkTable(
        first=np.concatenate([[0], np.cumsum(np.bincount(tensor, minlength=len(tensors)))]).astype(np.uint64),
        pack=pack[order],
        partial_row=parts.row.astype(np.uint64),
        partial_box=parts.box,
        partial_start=partial_starts(parts.ndim),
        **{name: values[order] for name, values in column.items()},
    )
    try:
        check_chunks(table, shapes, WHAT)
    except CorruptionError as error:
        raise _of_rank(error, int(order[error.context["row"]]), fragments, starts) from error
    return table, packs


@dataclass(frozen=True, slots=True)
class _Parts:
    """The chunks that are parts of tiles: their rows, and their boxes one after another."""

    row: Int64s  # [n]
    ndim: Int64s  # [n]
    box: npt.NDArray[np.uint64]  # flat

    @classmethod
    def of(cls, fragments: Sequence[Fragment], starts: Int64s, tensor: Int64s, shapes: TensorShapes) -> _Parts:
        """Return those of all fragments, with rows counted over all of them."""
        rows = [
            fragment.chunks.partial_row.astype(np.int64) + start
            for fragment, start in zip(fragments, starts.tolist(), strict=False)
        ]
        row = np.concatenate(rows)
        ndim = np.concatenate([fragment.chunks.partial_ndim for fragment in fragments]).astype(np.int64)
        box = np.concatenate([fragment.chunks.partial_box for fragment in fragments])
        odd = np.zeros(len(tensor), np.bool_)
        odd[row] = ndim != shapes.ndim[tensor[row]]
        refuse_rows(odd, WHAT, "is a box of another number of dims than its tensor")
        return cls(row, ndim, box)

    def by_ndim(self) -> Iterator[tuple[Int64s, npt.NDArray[np.uint64]]]:
        """Yield (places of parts, their boxes as ``[n, 2 * ndim]``), for each number of dims."""
        start = partial_starts(self.ndim)
        for ndim in np.unique(self.ndim).tolist():
            at = np.flatnonzero(self.ndim == ndim)
            yield at, self.box[start[at][:, None] + np.arange(2 * ndim)]

    def without_whole_tiles(self, tensor: Int64s, tile: npt.NDArray[np.uint32], shapes: TensorShapes) -> _Parts:
        """Return the parts that are not all of their tile."""
        whole = np.zeros(len(self.row), np.bool_)
        for at, boxes in self.by_ndim():
            rows = self.row[at]
            low, extent = tile_boxes(shapes, tensor[rows], tile[rows].astype(np.int64), boxes.shape[1] // 2)
            whole[at] = (boxes == np.concatenate([low, extent], axis=1).astype(np.uint64)).all(axis=1)
        return self._taken(np.flatnonzero(~whole), self.row) if whole.any() else self

    def moved(self, place_of: Int64s) -> _Parts:
        """Return the parts after row ``i`` has become row ``place_of[i]``, ascending again."""
        row = place_of[self.row]
        return self._taken(np.argsort(row, kind="stable"), row)

    def _taken(self, which: Int64s, row: Int64s) -> _Parts:
        """Return some parts, in the order of ``which``, with new rows."""
        ndim = self.ndim[which]
        to = partial_starts(ndim)
        from_start = partial_starts(self.ndim)[:-1][which]
        return _Parts(row[which], ndim, self.box[np.arange(to[-1]) + np.repeat(from_start - to[:-1], 2 * ndim)])


def _order(tensor: Int64s, tile: npt.NDArray[np.uint32], parts: _Parts, shapes: TensorShapes) -> Int64s:
    """Return the rows by tensor, tile and first element."""
    key = (tensor.astype(np.uint64) << np.uint64(32)) | tile
    if not len(parts.row):
        return np.argsort(key, kind="stable")
    element = np.zeros(len(tensor), np.uint64)  # row-major, in the whole tensor; of use between parts of one tile only
    for at, boxes in parts.by_ndim():
        rows = parts.row[at]
        ndim = boxes.shape[1] // 2
        shape = shapes.shape[shapes.start[tensor[rows]][:, None] + np.arange(ndim)].astype(np.uint64)
        for dim in range(ndim):
            element[rows] = element[rows] * shape[:, dim] + boxes[:, dim]
    return np.lexsort((element, key))


def _unite_packs(fragments: Sequence[Fragment]) -> tuple[npt.NDArray[np.uint32], tuple[PackRecord, ...]]:
    """Return the pack of every chunk, as an index into one table that has the packs in use, by name."""
    size_of: dict[str, int] = {}
    in_use: list[tuple[list[str], Int64s]] = []
    for fragment in fragments:
        indexes, places = np.unique(fragment.chunks.pack, return_inverse=True)
        used = [fragment.packs[index] for index in indexes.tolist()]
        for pack in used:
            if size_of.setdefault(pack.name, pack.size_bytes) != pack.size_bytes:
                raise CorruptionError(
                    f"cannot use the fragment of rank {fragment.rank}: it says that pack {pack.name} has "
                    f"{pack.size_bytes} bytes, another rank {size_of[pack.name]}",
                    rank=fragment.rank,
                )
        in_use.append(([pack.name for pack in used], places))
    number = {name: index for index, name in enumerate(sorted(size_of))}
    columns = [np.array([number[name] for name in names], np.uint32)[places] for names, places in in_use]
    return np.concatenate(columns), tuple([PackRecord(name, size_of[name]) for name in number])


def _of_rank(error: CorruptionError, row: int, fragments: Sequence[Fragment], starts: Int64s) -> CorruptionError:
    """Return the error with the rank that brought the row."""
    rank = fragments[int(np.searchsorted(starts, row, side="right")) - 1].rank
    return CorruptionError(f"{error.message}; it is of the fragment of rank {rank}", **{**error.context, "rank": rank})
