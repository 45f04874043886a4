"""Cutting a tensor into bands: boxes whose bytes lie one after another in row-major order, each of bounded size.

A tensor that is larger than memory is read and written band by band. Bands end on tile lines wherever the bound allows
it, so that no stored chunk is read twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vescale_ckpt.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator


def bands(shape: tuple[int, ...], tile: tuple[int, ...], item_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Yield boxes that cover a tensor in row-major order, each contiguous and at most ``max_bytes`` large.

    Where one row of tiles is larger than the bound, bands are thinner than tiles and the chunks of that row are read
    once a band; a single element is a band even if it is larger than the bound. Nothing for a tensor without elements.
    """
    if math.prod(shape) == 0:
        return
    yield from _bands(shape, tile, (), item_bytes, max_bytes)


def _bands(
    shape: tuple[int, ...], tile: tuple[int, ...], lead: tuple[int, ...], item_bytes: int, max_bytes: int
) -> Iterator[Box]:
    """Yield the bands of the part of a tensor whose first indexes are ``lead``."""
    dim = len(lead)
    ones = (1,) * dim
    if dim == len(shape):
        yield Box(lead, ones)
        return
    row_bytes = math.prod(shape[dim + 1 :]) * item_bytes
    num_rows = min(shape[dim], max_bytes // row_bytes)
    if num_rows == 0:
        for index in range(shape[dim]):
            yield from _bands(shape, tile, (*lead, index), item_bytes, max_bytes)
        return
    rest = shape[dim + 1 :]
    start = 0
    while start < shape[dim]:
        stop = min(start + num_rows, shape[dim])
        if start // tile[dim] != stop // tile[dim] and stop < shape[dim]:
            stop -= stop % tile[dim]  # back to the last tile line that the band has reached
        yield Box((*lead, start, *(0 for _ in rest)), (*ones, stop - start, *rest))
        start = stop
