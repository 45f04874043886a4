"""The load plan: which stored chunks fill which boxes that a rank wants, and which rank reads each chunk.

A chunk that several ranks need is read by one of them and handed to the others, so storage gives every byte once. Every
rank makes the same plan from the rows that all ranks need.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tile_cover import check_tile_cover_columns
from vescale_ckpt.geometry.tiles import TileGrid
from vescale_ckpt.state.dtypes import item_bytes
from vescale_ckpt.state.tree import fqn
from vescale_storage.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest

RAW = int(Codec.RAW)


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
    proved: set[int] = set()
    for number, want in enumerate(wants):
        record = manifest.tensors[want.tensor]
        tensor = want.tensor if record.alias_of is None else record.alias_of
        if tensor not in proved:
            prove_cover(manifest, tensor)
            proved.add(tensor)
        if want.box.volume == 0:
            continue
        for row, box in _rows(manifest, tensor, want.box):
            common = box.intersect(want.box)
            if common is None:
                continue
            place[row] = (tensor, box)
            copies.setdefault(row, []).append(
                Copy(number, common.relative_to(box), common.relative_to(want.box)),
            )
    return [ChunkNeed(row, *place[row], tuple(copies[row])) for row in sorted(copies)]


def prove_cover(manifest: Manifest, tensor: int) -> None:
    """Check that every element of a tensor was written exactly once.

    Raises:
        CorruptionError: naming what is missing and what stands twice.
    """
    record, chunks = manifest.tensors[tensor], manifest.chunks
    first, last = int(chunks.first[tensor]), int(chunks.first[tensor + 1])
    tiles = chunks.tile[first:last]
    low, high = np.searchsorted(chunks.partial_row, [first, last])
    num_tiles = TileGrid(record.shape, record.tile).num_tiles
    if low == high and len(tiles) == num_tiles and bool((tiles == np.arange(num_tiles, dtype=tiles.dtype)).all()):
        return
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


def _rows(manifest: Manifest, tensor: int, box: Box) -> Iterable[tuple[int, Box]]:
    """Yield (row, chunk box) of the chunks in the tiles that ``box`` touches."""
    record, chunks = manifest.tensors[tensor], manifest.chunks
    grid = TileGrid(record.shape, record.tile)
    first, last = int(chunks.first[tensor]), int(chunks.first[tensor + 1])
    tiles = chunks.tile[first:last]
    low, high = np.searchsorted(chunks.partial_row, [first, last])
    if low == high:  # whole tiles only, all present (proved): the row is the tile
        for tile, _ in grid.cut(box):
            yield first + tile, grid.box(tile)
        return
    for tile, _ in grid.cut(box):
        begin, end = np.searchsorted(tiles, [tile, tile + 1])
        rows = range(first + int(begin), first + int(end))
        offsets, sizes = chunks.boxes_of(record, rows)
        for row, offset, size in zip(rows, offsets, sizes, strict=True):
            yield row, _box(offset, size)


def raw_bytes_of(manifest: Manifest, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many bytes each chunk has once decoded, for ascending rows of the chunk table."""
    chunks = manifest.chunks
    out = chunks.length[rows].astype(np.int64)
    for place in np.flatnonzero(chunks.codec[rows] != RAW):
        row = int(rows[place])
        record = manifest.tensors[int(np.searchsorted(chunks.first, row, side="right")) - 1]
        out[place] = chunks.raw_bytes(record, range(row, row + 1), item_bytes(record.dtype))[0]
    return out


def _box(offset: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Box:
    return Box(tuple(offset.tolist()), tuple(size.tolist()))


@dataclass(frozen=True, slots=True)
class ReadShare:
    """Who reads what, over all ranks that load together."""

    own: npt.NDArray[np.int64]
    """Rows that this rank reads and nobody else needs."""
    rounds: tuple[SharedRound, ...]
    """Rows that several ranks need, in rounds of bounded size that all ranks take together."""


@dataclass(frozen=True, slots=True)
class SharedRound:
    """Rows read once each and exchanged; the same on every rank."""

    rows: npt.NDArray[np.int64]  # [num_rows]
    raw_bytes: npt.NDArray[np.int64]  # [num_rows] decoded
    reader: npt.NDArray[np.int64]  # [num_rows] the rank that reads it
    wanted: npt.NDArray[np.bool_]  # [world_size, num_rows]


def share_reads(
    manifest: Manifest, needed: Sequence[npt.NDArray[np.int64]], *, rank: int, round_bytes: int
) -> ReadShare:
    """Divide the rows that all ranks need into those that one rank needs and those to read once and exchange.

    Args:
        manifest: what is loaded.
        needed: per rank, the ascending rows that it needs.
        rank: whose own rows to return.
        round_bytes: how many bytes a round exchanges at most; a larger chunk makes a round alone.
    """
    world_size = len(needed)
    count = np.zeros(len(manifest.chunks), dtype=np.int64)
    for rows in needed:
        count[rows] += 1
    own = needed[rank][count[needed[rank]] == 1]
    shared = np.flatnonzero(count > 1)
    if not shared.size:
        return ReadShare(own, ())
    wanted = np.zeros((world_size, shared.size), dtype=bool)
    for r, rows in enumerate(needed):
        wanted[r] = np.isin(shared, rows, assume_unique=True)
    stored = manifest.chunks.length
    loads = np.array([int(stored[rows[count[rows] == 1]].sum()) for rows in needed], dtype=np.int64)
    reader = np.empty(shared.size, dtype=np.int64)
    sizes = raw_bytes_of(manifest, shared)
    for i in np.argsort(-sizes, kind="stable"):  # the largest first: least loaded reader that needs it anyway
        able = np.flatnonzero(wanted[:, i])
        reader[i] = able[np.argmin(loads[able])]
        loads[reader[i]] += sizes[i]
    bounds = _round_bounds(sizes, round_bytes)
    rounds = tuple(SharedRound(shared[a:b], sizes[a:b], reader[a:b], wanted[:, a:b]) for a, b in pairwise(bounds))
    return ReadShare(own, rounds)


def _round_bounds(sizes: npt.NDArray[np.int64], round_bytes: int) -> list[int]:
    bounds, total = [0], 0
    for i, size in enumerate(sizes.tolist()):
        if total and total + size > round_bytes:
            bounds.append(i)
            total = 0
        total += size
    return [*bounds, len(sizes)]
