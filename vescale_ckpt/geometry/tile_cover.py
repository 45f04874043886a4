"""Proof that a tensor's rows of a chunk table cover it exactly once, for tables of millions of rows.

A row is a whole tile or, where a shard's edge runs through a tile, a part of one; so it is enough to look at tiles, and
only at those that do not settle themselves by counting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import DEFAULT_LIMIT, CoverFinder, CoverReport
from vescale_ckpt.geometry.flat import flat_to_boxes
from vescale_ckpt.geometry.tiles import TileGrid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

_MAX_PAIRWISE = 64
"""Up to so many parts of one tile are compared in pairs, all tiles at once; a tile of more is looked at by itself."""


def check_tile_cover(
    shape: tuple[int, ...],
    tile: tuple[int, ...],
    tile_indexes: npt.NDArray[np.integer],
    partial: Sequence[tuple[int, Box]] = (),
    *,
    limit: int = DEFAULT_LIMIT,
) -> CoverReport:
    """Return whether a tensor's rows of a chunk table cover it exactly once; positions in the report are rows.

    Row ``i`` is the whole tile ``tile_indexes[i]`` unless ``partial`` names it: then it is that box, in that tile.

    Raises:
        LayoutError: if a tile index, a partial row, or a partial box's number of dims is out of range.
    """
    ndim = len(shape)
    if wrong := [box for _, box in partial if box.ndim != ndim]:
        raise LayoutError(f"{wrong[0]} has {wrong[0].ndim} dims, the tensor to be covered has the shape {shape}")
    # Any number that an int64 cannot hold is out of range already.
    largest = np.iinfo(np.int64).max
    numbers = [[min(n, largest) for n in (*box.offset, *box.shape)] for _, box in partial]
    rows = np.array([row for row, _ in partial], np.int64)
    columns = np.array(numbers, np.int64).reshape(len(rows), 2 * ndim)
    return check_tile_cover_columns(shape, tile, tile_indexes, rows, columns, limit=limit)


def check_tile_cover_columns(
    shape: tuple[int, ...],
    tile: tuple[int, ...],
    tile_indexes: npt.NDArray[np.integer],
    partial_rows: npt.NDArray[np.integer],
    partial_boxes: npt.NDArray[np.integer],
    *,
    limit: int = DEFAULT_LIMIT,
) -> CoverReport:
    """Return what ``check_tile_cover`` does, from columns, without a Python object per row.

    ``partial_boxes`` is ``[num_partial, 2 * ndim]``: offsets, then sizes, of the global tensor. Nothing is trusted: any
    integers give a report or a ``LayoutError``, and memory is bounded by the number of rows, not of tiles.

    Raises:
        LayoutError: if a tile index or a partial row is out of range.
    """
    grid = TileGrid(shape, tile)
    tiles, rows = _as_int64(tile_indexes), _as_int64(partial_rows)
    numbers = _as_int64(partial_boxes).reshape(len(rows), 2 * grid.ndim)
    _check_rows(grid, tiles, rows)
    starts, sizes = numbers[:, : grid.ndim], numbers[:, grid.ndim :]
    inside, usable = _lie_in_tile(grid, tiles[rows], starts, sizes)

    is_whole = np.ones(len(tiles), np.bool_)
    is_whole[rows] = False
    present, group = np.unique(tiles, return_inverse=True)
    num_whole = np.bincount(group[is_whole], minlength=len(present))
    parts = group[rows[usable]]
    num_parts = np.bincount(parts, minlength=len(present))
    good = (num_whole == 1) & (num_parts == 0)
    tile_volumes = grid.boxes(present)[1].prod(axis=1)
    partitioned = _are_partitioned(tile_volumes, parts, starts[usable], sizes[usable])
    good |= (num_whole == 0) & partitioned

    finder = CoverFinder(limit)
    finder.add_missing(_missing_tiles(grid, present))
    if not good.all():
        offsets, extents = grid.boxes(tiles)
        offsets[rows[usable]], extents[rows[usable]] = starts[usable], sizes[usable]
        is_whole[rows[usable]] = True
        order = np.flatnonzero(is_whole)[np.argsort(group[is_whole], kind="stable")]
        edges = np.searchsorted(group[order], np.arange(len(present) + 1))
        for k in np.flatnonzero(~good):
            if finder.full:
                break
            at = order[edges[k] : edges[k + 1]]
            finder.check(grid.box(int(present[k])), offsets[at], offsets[at] + extents[at], at)
    return finder.report(rows[~inside].tolist())


def _as_int64(numbers: npt.NDArray[np.integer]) -> Int64s:
    """Return the numbers as int64; an unsigned one too large for it becomes the largest, which lies nowhere."""
    if numbers.dtype == np.uint64:
        numbers = np.minimum(numbers, np.uint64(np.iinfo(np.int64).max))
    return numbers.astype(np.int64)


def _check_rows(grid: TileGrid, tiles: Int64s, rows: Int64s) -> None:
    """Refuse tiles and rows that do not exist."""
    if len(tiles) and not 0 <= int(tiles.min()) <= int(tiles.max()) < grid.num_tiles:
        raise LayoutError(f"chunks of the tiles {int(tiles.min())} to {int(tiles.max())} of {grid}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(tiles):
        raise LayoutError(f"partial rows {int(rows.min())} to {int(rows.max())} of a table of {len(tiles)} chunks")
    if len(np.unique(rows)) != len(rows):
        raise LayoutError("a chunk's row is listed as partial more than once")


def _lie_in_tile(grid: TileGrid, tiles: Int64s, starts: Int64s, sizes: Int64s) -> tuple[Bools, Bools]:
    """Return per partial box whether it lies in its tile, and whether it does and holds an element."""
    low, extent = grid.boxes(tiles)
    # Written as differences of numbers that are known to be in range by then, so that nothing can overflow.
    inside = np.all((starts >= low) & (starts - np.minimum(low, starts) <= extent) & (sizes >= 0), axis=1)
    room = np.where(inside[:, None], extent - (np.maximum(starts, low) - low), 0)
    inside &= np.all(sizes <= room, axis=1)
    return inside, inside & np.all(sizes > 0, axis=1)


def _are_partitioned(tile_volumes: Int64s, parts: Int64s, starts: Int64s, sizes: Int64s) -> Bools:
    """Return per tile whether its parts, which lie in it and are not empty, are known to partition it.

    ``parts`` says which tile each part is of. Disjoint parts whose volumes add up to the tile's are a partition.
    """
    order = np.argsort(parts, kind="stable")
    parts, starts, ends = parts[order], starts[order], (starts + sizes)[order]
    counts = np.bincount(parts, minlength=len(tile_volumes))
    volumes = np.zeros(len(tile_volumes), np.int64)
    np.add.at(volumes, parts, sizes[order].prod(axis=1))
    # A sum that overflowed to the right one has overlaps, which the pairs below show.
    known: Bools = (volumes == tile_volumes) & (counts > 0) & (counts <= _MAX_PAIRWISE)
    candidates = np.flatnonzero(known[parts])
    parts, starts, ends = parts[candidates], starts[candidates], ends[candidates]
    for step in range(1, int(counts[known].max(initial=0))):
        # The parts of a tile stand together: all its pairs are those at distances below their number.
        pair = np.flatnonzero(parts[step:] == parts[:-step])
        overlap = ((starts[pair] < ends[pair + step]) & (starts[pair + step] < ends[pair])).all(axis=1)
        known[parts[pair[overlap]]] = False
    return known


def _missing_tiles(grid: TileGrid, present: Int64s) -> Iterator[Box]:
    """Yield, as few boxes as their numbering allows, the tiles that are not in the sorted ``present``."""
    if len(present) == grid.num_tiles:
        return
    edges = np.concatenate([[-1], present, [grid.num_tiles]])
    for gap in np.flatnonzero(np.diff(edges) > 1):
        for tiles in flat_to_boxes(grid.counts, int(edges[gap]) + 1, int(edges[gap + 1])):
            low = tuple(o * t for o, t in zip(tiles.offset, grid.tile, strict=True))
            high = (min(e * t, n) for e, t, n in zip(tiles.end, grid.tile, grid.shape, strict=True))
            yield Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))
