"""The load plan: which stored chunks fill which boxes that a rank wants; which rank reads each is ``read_share``'s.

No chunk is used of a tensor that is not proved to be there whole, every element once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tile_cover import check_tile_cover_columns
from vescale_ckpt.geometry.tiles import grid_of
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a stored tensor that this rank wants."""

    tensor: int
    """Index into the manifest's tensor table; aliases are resolved by the plan."""
    box: Box


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a chunk that goes to a part of a want."""

    want: int
    """Index of the want."""
    source: Box
    """Relative to the chunk."""
    target: Box
    """Relative to the want's box."""


@dataclass(frozen=True, slots=True)
class ChunkNeed:
    """One stored chunk and where its parts go."""

    row: int
    """In the manifest's chunk table."""
    tensor: int
    """Index into the manifest's tensor table, of the record that has the chunks."""
    box: Box
    """What the chunk holds, in the global tensor."""
    copies: tuple[Copy, ...]


def chunks_needed(manifest: Manifest, wants: Sequence[Want]) -> list[ChunkNeed]:
    """Return the chunks that fill ``wants``, each once, by row.

    Raises:
        CorruptionError: an element wanted was not written exactly once.
    """
    copies: dict[int, list[Copy]] = {}
    place: dict[int, tuple[int, Box]] = {}
    stored = [manifest.resolve(want.tensor) for want in wants]
    tensors = np.unique(np.array(stored, dtype=np.int64))
    whole = dict(zip(tensors.tolist(), _are_whole_tiles(manifest, tensors).tolist(), strict=True))
    for tensor in (tensor for tensor, is_whole in whole.items() if not is_whole):
        prove_cover(manifest, tensor)
    for number, (want, tensor) in enumerate(zip(wants, stored, strict=True)):
        if want.box.volume == 0:
            continue
        for row, box, common in (_tile_rows if whole[tensor] else chunks_touching)(manifest, tensor, want.box):
            place[row] = (tensor, box)
            copies.setdefault(row, []).append(
                Copy(number, common.relative_to(box), common.relative_to(want.box)),
            )
    return [ChunkNeed(row, *place[row], tuple(copies[row])) for row in sorted(copies)]


def prove_covers(manifest: Manifest) -> None:
    """Check that every element of every tensor was written exactly once.

    Raises:
        CorruptionError: naming what is missing and what stands twice in the first tensor that is not.
    """
    tensors = np.array([i for i, record in enumerate(manifest.tensors) if record.alias_of is None], dtype=np.int64)
    for tensor in tensors[~_are_whole_tiles(manifest, tensors)].tolist():
        prove_cover(manifest, tensor)


def _are_whole_tiles(manifest: Manifest, tensors: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return per tensor whether its rows are all of its tiles, whole and in order: nothing more is to be proved then.

    All tensors at once, for a model may have very many.
    """
    chunks = manifest.chunks
    first, last = chunks.first[tensors], chunks.first[tensors + 1]
    counts = (last - first).astype(np.int64)
    records = [manifest.tensors[tensor] for tensor in tensors.tolist()]
    whole: npt.NDArray[np.bool_]
    whole = counts == np.array([grid_of(r.shape, r.tile).num_tiles for r in records], dtype=np.int64)
    whole &= np.searchsorted(chunks.partial_row, first) == np.searchsorted(chunks.partial_row, last)
    tile = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    misplaced = chunks.tile[np.repeat(first.astype(np.int64), counts) + tile] != tile
    whole[np.repeat(np.arange(len(tensors)), counts)[misplaced]] = False
    return whole


def prove_cover(manifest: Manifest, tensor: int) -> None:
    """Check that every element of a tensor was written exactly once.

    Raises:
        CorruptionError: naming what is missing and what stands twice.
    """
    record, chunks = manifest.tensors[tensor], manifest.chunks
    first, last = int(chunks.first[tensor]), int(chunks.first[tensor + 1])
    tiles = chunks.tile[first:last]
    places, boxes = chunks.partials_of(record, range(first, last))
    report = check_tile_cover_columns(record.shape, record.tile, tiles, places, boxes)
    if not report.ok:
        raise CorruptionError(
            f"cannot use '{fqn(record.path)}' {record.shape} of {manifest.run}@{manifest.step}: not every element was "
            f"written exactly once - missing {report.missing[:4]}, twice {report.overlaps[:4]}",
            fqn=fqn(record.path),
        )


def same_bytes(manifest: Manifest, a: int, b: int) -> bool:
    """Return whether two stored tensors hold the same bytes, as far as their chunks' digests tell."""
    a, b = manifest.resolve(a), manifest.resolve(b)
    chunks, left, right = manifest.chunks, manifest.tensors[a], manifest.tensors[b]
    if (left.dtype, left.shape, left.tile) != (right.dtype, right.shape, right.tile):
        return False
    rows_a, rows_b = chunks.rows(a), chunks.rows(b)
    boxes_a, boxes_b = chunks.boxes_of(left, rows_a), chunks.boxes_of(right, rows_b)
    return (
        np.array_equal(chunks.digest[rows_a.start : rows_a.stop], chunks.digest[rows_b.start : rows_b.stop])
        and np.array_equal(boxes_a[0], boxes_b[0])
        and np.array_equal(boxes_a[1], boxes_b[1])
    )


def _tile_rows(manifest: Manifest, tensor: int, box: Box) -> Iterator[tuple[int, Box, Box]]:
    """Yield (row, chunk box, its part in ``box``) of a tensor whose rows are its tiles."""
    record = manifest.tensors[tensor]
    grid, first = grid_of(record.shape, record.tile), int(manifest.chunks.first[tensor])
    for tile, common in grid.cut(box):
        yield first + tile, common if common.shape == grid.tile else grid.box(tile), common


def chunks_touching(manifest: Manifest, tensor: int, box: Box) -> Iterator[tuple[int, Box, Box]]:
    """Yield (row, chunk box, its part in ``box``) of the chunks that have any."""
    record, chunks = manifest.tensors[tensor], manifest.chunks
    grid = grid_of(record.shape, record.tile)
    rows = chunks.rows(tensor)
    tiles = chunks.tile[rows.start : rows.stop]
    corners = Box(box.offset, (1,) * box.ndim), Box(tuple(e - 1 for e in box.end), (1,) * box.ndim)
    ends = np.array([grid.index_of(corner) for corner in corners]).astype(tiles.dtype)  # of one type, or all are cast
    begin, end = int(np.searchsorted(tiles, ends[0])), int(np.searchsorted(tiles, ends[1], side="right"))
    rows = range(rows.start + begin, rows.start + end)
    offsets, sizes = chunks.boxes_of(record, rows)
    low = np.maximum(offsets, np.array(box.offset, dtype=np.int64))
    extent = np.minimum(offsets + sizes, np.array(box.end, dtype=np.int64)) - low
    for place in np.flatnonzero((extent > 0).all(axis=1)):
        yield rows[place], _box(offsets[place], sizes[place]), _box(low[place], extent[place])


def _box(offset: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Box:
    return Box(tuple(offset.tolist()), tuple(size.tolist()))
