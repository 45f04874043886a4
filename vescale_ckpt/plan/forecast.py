"""The forecast of a load: which rank of a mesh would hold what, read what, and be handed what by others.

Made from a manifest and the placements alone, by the plans that a load itself follows; no rank of it need exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import ConfigError
from vescale_ckpt.geometry.tiles import grid_of
from vescale_ckpt.layout.layout import Layout, spans
from vescale_ckpt.layout.mesh import coordinates
from vescale_ckpt.layout.placement import Replicate
from vescale_ckpt.plan.load_plan import prove_covers
from vescale_ckpt.plan.read_share import NOBODY, raw_bytes_of, share_reads
from vescale_ckpt.state.dtypes import item_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.layout.placement import Placement

MOST_RANKS = 16_384


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What one rank would do."""

    rank: int
    coordinate: tuple[int, ...]
    held_bytes: int
    """Of its shards, in memory."""
    needed_bytes: int
    """Of the chunks that its shards touch, as stored."""
    read_bytes: int
    """Of those that it reads itself, as stored."""
    received_bytes: int
    """Of those that other ranks read and hand to it, decoded."""
    num_chunks: int
    """That it reads."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What all ranks would do."""

    ranks: tuple[RankForecast, ...]
    stored_bytes: int
    """Of all chunks that any rank needs, each once; all of them together read no more."""
    held: Mapping[str, tuple[tuple[Box, ...], ...]]
    """Per tensor the boxes of each rank, in the order of ranks."""

    @property
    def read_bytes(self) -> int:
        """What storage is asked for."""
        return sum(rank.read_bytes for rank in self.ranks)

    @property
    def exchanged_bytes(self) -> int:
        """What ranks hand to one another."""
        return sum(rank.received_bytes for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """Most bytes that a rank reads, over the mean; 1 where nothing is read."""
        mean = self.read_bytes / len(self.ranks)
        return max(rank.read_bytes for rank in self.ranks) / mean if mean else 1.0


def forecast_load(
    manifest: Manifest, mesh_shape: tuple[int, ...], placements: Mapping[int, Sequence[Placement]]
) -> Forecast:
    """Return what a load of some tensors onto a mesh would do.

    Args:
        manifest: what is loaded.
        mesh_shape: sizes of the axes; ranks are numbered in row-major order.
        placements: index of a tensor -> one placement for each axis.

    Raises:
        LayoutError: placements and shapes do not fit.
        ConfigError: the mesh has too many ranks to look at one by one.
        CorruptionError: an element of a tensor was not written exactly once.
    """
    num_ranks = math.prod(mesh_shape)
    if not 0 < num_ranks <= MOST_RANKS:
        raise ConfigError(f"cannot forecast a load on {num_ranks} ranks: expected 1 to {MOST_RANKS}")
    layouts = {tensor: Layout(mesh_shape, tuple(chosen)) for tensor, chosen in placements.items()}
    # Ranks that differ along axes which replicate everything hold the same; they are looked at once.
    replicates = [
        all(isinstance(layout.placements[axis], Replicate) for layout in layouts.values())
        for axis in range(len(mesh_shape))
    ]
    at = list(coordinates(mesh_shape))
    kinds = [tuple(0 if replicates[axis] else x for axis, x in enumerate(place)) for place in at]
    boxes = {kind: _boxes(manifest, layouts, kind) for kind in dict.fromkeys(kinds)}
    finder = _RowFinder(manifest)
    rows = {kind: finder.touched(held) for kind, held in boxes.items()}
    needed = [rows[kind] for kind in kinds]
    reader = share_reads(manifest, needed, rank=0, round_bytes=1 << 40).reader
    every = np.flatnonzero(reader != NOBODY)
    stored = manifest.chunks.length.astype(np.int64)
    raw = np.zeros(len(stored), dtype=np.int64)
    raw[every] = raw_bytes_of(manifest, every)
    ranks = []
    for rank, (place, kind) in enumerate(zip(at, kinds, strict=True)):
        mine = reader[needed[rank]] == rank
        read, received = needed[rank][mine], needed[rank][~mine]
        ranks.append(
            RankForecast(
                rank=rank,
                coordinate=place,
                held_bytes=_held_bytes(manifest, boxes[kind]),
                needed_bytes=int(stored[needed[rank]].sum()),
                read_bytes=int(stored[read].sum()),
                received_bytes=int(raw[received].sum()),
                num_chunks=len(read),
            )
        )
    held = {manifest.tensors[t].fqn: tuple(boxes[kind][t] for kind in kinds) for t in layouts}
    return Forecast(tuple(ranks), int(stored[every].sum()), held)


def _boxes(
    manifest: Manifest, layouts: Mapping[int, Layout], coordinate: tuple[int, ...]
) -> dict[int, tuple[Box, ...]]:
    """Return what a rank holds of each tensor; worked out once for tensors of one shape and layout."""
    known: dict[tuple[tuple[int, ...], Layout], tuple[Box, ...]] = {}
    found: dict[int, tuple[Box, ...]] = {}
    for tensor, layout in layouts.items():
        like = manifest.tensors[tensor].shape, layout
        if like not in known:
            known[like] = tuple(span.box for span in spans(layout, like[0], coordinate))
        found[tensor] = known[like]
    return found


class _RowFinder:
    """Finds the chunks that boxes touch: once for all tensors of one shape whose chunks are their tiles."""

    def __init__(self, manifest: Manifest) -> None:
        prove_covers(manifest)
        self._manifest = manifest
        self._tiles: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[Box, ...]], npt.NDArray[np.int64]] = {}

    def touched(self, held: Mapping[int, tuple[Box, ...]]) -> npt.NDArray[np.int64]:
        """Return the rows of the chunk table that some boxes touch, ascending, each once."""
        rows = [self._rows(self._manifest.resolve(tensor), boxes) for tensor, boxes in held.items() if boxes]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))

    def _rows(self, tensor: int, boxes: tuple[Box, ...]) -> npt.NDArray[np.int64]:
        record, chunks = self._manifest.tensors[tensor], self._manifest.chunks
        rows = chunks.rows(tensor)
        grid = grid_of(record.shape, record.tile)
        low, high = np.searchsorted(chunks.partial_row, np.array([rows.start, rows.stop], np.uint64))
        if len(rows) == grid.num_tiles and low == high:  # covered once, in the order of tiles: rows are tiles
            like = record.shape, record.tile, boxes
            if like not in self._tiles:
                self._tiles[like] = np.concatenate([grid.cut_columns(box).indexes for box in boxes])
            return self._tiles[like] + rows.start
        offsets, sizes = chunks.boxes_of(record, rows)
        touched = np.zeros(len(rows), np.bool_)
        for box in boxes:
            begin, end = np.array(box.offset, np.int64), np.array(box.end, np.int64)
            touched |= ((offsets < end) & (offsets + sizes > begin)).all(axis=1)
        return np.flatnonzero(touched) + rows.start


def _held_bytes(manifest: Manifest, held: Mapping[int, tuple[Box, ...]]) -> int:
    """Return the bytes of some boxes; those of tied tensors count once."""
    sizes: dict[tuple[int, tuple[Box, ...]], int] = {}
    for tensor, boxes in held.items():
        width = item_bytes(manifest.tensors[tensor].dtype)
        sizes[manifest.resolve(tensor), boxes] = sum(box.volume for box in boxes) * width
    return sum(sizes.values())
