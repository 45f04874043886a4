"""Parts: regions cut along the tile grid into pieces small enough to stage, and parts cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tiles import TileGrid, grid_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vescale_ckpt.format.records import TensorRecord
    from vescale_ckpt.plan.save_plan import Region


@dataclass(frozen=True, slots=True)
class Part:
    """A box to stage in one copy, bounded by tile lines and by what this rank holds."""

    tensor: int
    box: Box
    stored: bool
    """False: only hashed, to compare this copy of a replicated tensor with the one that another rank writes."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk of a part."""

    tensor: int
    tile: int
    box: Box
    whole_tile: bool
    stored: bool


def parts_of(
    regions: Sequence[Region], records: Sequence[TensorRecord], item_bytes: Sequence[int], most_bytes: int
) -> Iterator[Part]:
    """Yield the parts of what this rank writes, in order; none larger than ``most_bytes`` unless it is one tile."""
    for region in regions:
        record = records[region.tensor]
        grid = grid_of(record.shape, record.tile)
        if region.tiles is not None:
            for tile in region.tiles:
                box = grid.box(tile).intersect(region.box)
                if box is not None:
                    yield Part(region.tensor, box, stored=True)
            continue
        for box in cut_to_size(grid, region.box, most_bytes // item_bytes[region.tensor]):
            yield Part(region.tensor, box, stored=True)


def sample_tile(record: TensorRecord) -> int:
    """Return the tile that stands for a tensor where its copies are compared in part: the only one, or a middle one.

    Copies that are not meant to be copies (another rank's slice, another seed's weights) differ all over.
    """
    return grid_of(record.shape, record.tile).num_tiles // 2


def compared_parts(
    compared: Iterable[int],
    regions: Sequence[Region],
    records: Sequence[TensorRecord],
    *,
    every: bool,
) -> Iterator[Part]:
    """Yield the tiles that this rank holds as a copy and does not write, to be hashed and compared.

    Args:
        compared: tensors that this rank holds whole as one of several copies.
        regions: what this rank writes.
        records: the tensor table.
        every: all tiles of a tensor; else its ``sample_tile`` alone.
    """
    written: dict[int, list[Region]] = {}
    for region in regions:
        written.setdefault(region.tensor, []).append(region)
    for tensor in compared:
        record = records[tensor]
        grid = grid_of(record.shape, record.tile)
        mine: set[int] = set()
        for region in written.get(tensor, ()):
            mine.update(region.tiles if region.tiles is not None else (tile for tile, _ in grid.cut(region.box)))
        asked = range(grid.num_tiles) if every else range(grid.num_tiles)[sample_tile(record) :][:1]
        for tile in asked:
            if tile not in mine:
                yield Part(tensor, grid.box(tile), stored=False)


def cut_to_size(grid: TileGrid, box: Box, most_elements: int) -> Iterator[Box]:
    """Yield ``box`` cut along tile lines into boxes of at most ``most_elements``, or of one tile where that is larger.

    The leftmost dims are cut first: what is left of a row-major tensor then stays in long runs.
    """
    if box.volume <= most_elements:
        yield box
        return
    for dim, (offset, size, tile) in enumerate(zip(box.offset, box.shape, grid.tile, strict=True)):
        first, last = offset // tile, (offset + size - 1) // tile
        if first == last:
            continue
        at = (first + (last - first + 1) // 2) * tile
        low = Box(box.offset, (*box.shape[:dim], at - offset, *box.shape[dim + 1 :]))
        high_offset = (*box.offset[:dim], at, *box.offset[dim + 1 :])
        high = Box(high_offset, (*box.shape[:dim], offset + size - at, *box.shape[dim + 1 :]))
        yield from cut_to_size(grid, low, most_elements)
        yield from cut_to_size(grid, high, most_elements)
        return
    yield box


def chunks_of(part: Part, record: TensorRecord) -> Iterator[ChunkPlan]:
    """Yield the chunks of a part, by tile."""
    grid = grid_of(record.shape, record.tile)
    for tile, box in grid.cut(part.box):
        whole = box.shape == grid.tile or box.volume == grid.box(tile).volume
        yield ChunkPlan(part.tensor, tile, box, whole, part.stored)
