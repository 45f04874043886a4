"""Blocks: a tensor of any size cut into boxes that fit in memory, along the lines of its stored tiles. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from vescale_ckpt.geometry.tiles import grid_of, tile_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_ckpt.geometry.box import Box

BLOCK_BYTES: Final = 16 << 20
"""What a block holds at most, unless a single tile is more; values take up to eight times as much once converted."""


def blocks(shape: tuple[int, ...], item_bytes: int, most_bytes: int = BLOCK_BYTES) -> Iterator[Box]:
    """Yield disjoint boxes that cover a tensor, in row-major order; none where it has no element.

    Each is of whole tiles, so that no stored chunk of a tensor that was cut along them is read twice.
    """
    tile = tile_shape(shape, item_bytes)
    size = [max(n, 1) for n in shape]
    for dim, length in enumerate(tile):
        if math.prod(size) * item_bytes <= most_bytes:
            break
        per_index = math.prod(size) // size[dim] * item_bytes
        num_tiles = most_bytes // (per_index * length)
        size[dim] = min(size[dim], max(1, num_tiles) * length)
    grid = grid_of(shape, tuple(size))
    for index in range(grid.num_tiles):
        yield grid.box(index)
