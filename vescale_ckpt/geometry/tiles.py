"""The canonical cut of a tensor into tiles, and arithmetic on the grid that they make.

Chunks are cut along these lines whichever layout saves a tensor, so the same tensor has the same chunks, and the same
digests, under every layout whose shards fall on the lines.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

MIN_TILE_BYTES = 256 << 10
"""A tensor no larger than this is one tile; larger ones are cut until a tile is at most this or their share."""
MAX_TILE_BYTES = 4 << 20
"""No tile is larger: also the bound of what a reader holds of one chunk before its digest is known to be right."""
TILES_AIMED = 256
"""How many tiles a tensor between the two bounds is cut into."""
EVEN_SPLITS = 8
"""Up to so many parts all dims are split alike; beyond, only the leftmost dim that can still be split."""
MIN_RUN_BYTES = 512
"""The shortest run of contiguous bytes, in the whole tensor, that a tile may be made of."""


def tile_shape(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Return the canonical tile sizes of a tensor: a pure function of its global shape and item size.

    Frozen with the format version: another answer for the same arguments is another format. The rule:

    - A tile is the whole tensor at first, and is halved while it is larger than
      ``clamp(tensor bytes / 256, 256 KiB, 4 MiB)``.
    - Each step doubles the number of parts of one dim; the tile's size along a dim of ``n`` elements in ``p`` parts is
      ``ceil(n / p)``.
    - The dim is the one in the fewest parts (ties: leftmost) among those in fewer than 8; where there is none, the
      leftmost.
    - Only those dims are asked along which the tile is longer than 1, and whose halving leaves the tile's bytes in runs
      of at least 512 that are contiguous in the whole tensor. The leftmost dim that is longer than 1 always qualifies.

    Why: up to 8 parts along every dim put tensor-parallel shards (at most the devices of a host) on tile lines. Beyond
    that, only data-parallel shards are finer, and they cut the leftmost dim; a rank that holds a few full rows makes
    one chunk per part of the other dims, so more parts there mean only more and smaller chunks. Counted for a model of
    405 billion parameters with Adam on 512 ranks (8 tensor- times 64 data-parallel): 11 million chunks, 27 million if
    dims were split alike without end, and 6 million with 4 parts, which would put shards of degree 8 off the lines.

    The shortest run is for copies: gathering a tile from runs of 16, 128, 512, 1,024 and 16,384 bytes went at 1.6, 3.4,
    5.6, 6.0 and 8.2 GB/s, where a contiguous copy went at 8.5; 512 keeps eight parts of a 4,096-wide one-byte matrix.
    Without it a (1000000, 8) table was cut into single columns and a convolution kernel into its taps. Splitting by 3
    where 3 divides was measured too, and left out: it helps degrees 3 and 6 of such dims and takes the alignment of 4,
    8 and 16. Where a degree does not fall on the lines, each of its edges makes one more row of (smaller) chunks.

    A dim of zero elements has the tile size 1, so tile sizes are positive.

    Raises:
        LayoutError: if a size is negative, the item size is not positive, or the tensor is of 2^63 bytes or more.
    """
    if item_bytes < 1 or any(n < 0 for n in shape):
        raise LayoutError(f"cannot tile a tensor of shape {shape} with items of {item_bytes} bytes: sizes must be >= 0")
    total_bytes = math.prod(shape) * item_bytes
    if total_bytes >= 1 << 63:
        raise LayoutError(f"cannot tile a tensor of shape {shape}: its {total_bytes} bytes are not below 2^63")
    goal_bytes = max(MIN_TILE_BYTES, min(MAX_TILE_BYTES, total_bytes // TILES_AIMED))
    parts = [1] * len(shape)
    tile = [max(n, 1) for n in shape]
    if total_bytes == 0:
        return tuple(tile)
    while math.prod(tile) * item_bytes > goal_bytes:
        dim = _dim_to_halve(shape, tile, parts, item_bytes)
        parts[dim] *= 2
        tile[dim] = -(-shape[dim] // parts[dim])
    return tuple(tile)


def _dim_to_halve(shape: tuple[int, ...], tile: list[int], parts: list[int], item_bytes: int) -> int:
    """Return the dim that the rule of ``tile_shape`` halves next."""
    # A tile's bytes are contiguous from the last dim that is cut rightwards.
    last_cut = max((d for d in range(len(shape)) if tile[d] < shape[d]), default=-1)

    def may_halve(d: int) -> bool:
        if d < last_cut:
            return True
        run = -(-shape[d] // (2 * parts[d])) * math.prod(shape[d + 1 :])
        return run * item_bytes >= MIN_RUN_BYTES

    able = [d for d in range(len(shape)) if tile[d] > 1 and may_halve(d)]
    few = [d for d in able if parts[d] < EVEN_SPLITS]
    return min(few, key=lambda d: (parts[d], d)) if few else able[0]


@functools.lru_cache(maxsize=4096)
def grid_of(shape: tuple[int, ...], tile: tuple[int, ...]) -> TileGrid:
    """Return the grid of a tensor, made once for the many tensors of a model that have the same shape.

    Raises:
        LayoutError: as ``TileGrid``.
    """
    return TileGrid(shape, tile)


@dataclass(frozen=True, slots=True)
class TileCuts:
    """The parts of a box, one per tile that it touches, as columns in order of tile index."""

    indexes: npt.NDArray[np.int64]  # [n] of the tiles
    offsets: npt.NDArray[np.int64]  # [n, ndim] of the parts, in the tensor
    sizes: npt.NDArray[np.int64]  # [n, ndim]
    whole: npt.NDArray[np.bool_]  # [n] whether the part is the whole tile


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles of one tensor, numbered in row-major order; the last tile along a dim may be shorter."""

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    counts: tuple[int, ...] = field(init=False)
    """Number of tiles per dim."""
    num_tiles: int = field(init=False)
    """Number of tiles: 1 for a 0-d tensor, 0 for a tensor without elements."""
    _strides: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """How much one step along a dim adds to a tile's index."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.tile):
            raise LayoutError(f"tile {self.tile} has {len(self.tile)} dims, the tensor {self.shape} {len(self.shape)}")
        if any(n < 0 for n in self.shape) or any(t < 1 for t in self.tile):
            raise LayoutError(f"cannot cut shape {self.shape} by tile {self.tile}: a size is out of range")
        if math.prod(self.shape) >= 1 << 63 or any(t >= 1 << 63 for t in self.tile):
            raise LayoutError(f"cannot cut shape {self.shape} by tile {self.tile}: 2^63 elements or more")
        counts = tuple(-(-n // t) for n, t in zip(self.shape, self.tile, strict=True))
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "num_tiles", math.prod(counts))
        object.__setattr__(self, "_strides", tuple(math.prod(counts[d + 1 :]) for d in range(len(counts))))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def box(self, index: int) -> Box:
        """Return the box of a tile.

        Raises:
            LayoutError: if there is no such tile.
        """
        if not 0 <= index < self.num_tiles:
            raise LayoutError(f"tile {index} asked of {self}, which has {self.num_tiles}")
        offset: list[int] = []
        for stride, tile in zip(self._strides, self.tile, strict=True):
            at, index = divmod(index, stride)
            offset.append(at * tile)
        sizes = zip(self.tile, self.shape, offset, strict=True)
        return Box(tuple(offset), tuple(min(t, n - o) for t, n, o in sizes))

    def boxes(self, indexes: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (offsets, sizes), each ``int64[n, ndim]``, of the tiles ``indexes`` (any integer type, ``[n]``).

        Raises:
            LayoutError: if there is no such tile.
        """
        if indexes.size and (int(indexes.min()) < 0 or int(indexes.max()) >= self.num_tiles):
            asked = (int(indexes.min()), int(indexes.max()))
            raise LayoutError(f"tiles {asked[0]} to {asked[1]} asked of {self}, which has {self.num_tiles}")
        rest = indexes.astype(np.int64)
        offsets = np.empty((len(rest), self.ndim), np.int64)
        sizes = np.empty_like(offsets)
        for d, (stride, tile) in enumerate(zip(self._strides, self.tile, strict=True)):
            at, rest = np.divmod(rest, stride)
            offsets[:, d] = at * tile
            sizes[:, d] = np.minimum(tile, self.shape[d] - offsets[:, d])
        return offsets, sizes

    def cut(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (tile index, part of ``box`` in that tile) in order of index; nothing if the box is empty.

        Raises:
            LayoutError: if the box does not lie in the tensor.
        """
        self._check_inside(box)
        if box.volume == 0:
            return
        per_dim = [
            [
                (i * stride, max(i * tile, lo), min((i + 1) * tile, hi) - max(i * tile, lo))
                for i in range(lo // tile, -(-hi // tile))
            ]
            for lo, hi, tile, stride in zip(box.offset, box.end, self.tile, self._strides, strict=True)
        ]
        for steps in itertools.product(*per_dim):
            index = sum(step[0] for step in steps)
            yield index, Box(tuple(step[1] for step in steps), tuple(step[2] for step in steps))

    def cut_columns(self, box: Box) -> TileCuts:
        """Return what ``cut`` yields, as columns.

        Raises:
            LayoutError: if the box does not lie in the tensor.
        """
        self._check_inside(box)
        indexes = np.zeros(0 if box.volume == 0 else 1, np.int64)
        ranges = zip(box.offset, box.end, self.tile, self._strides, strict=True)
        for lo, hi, tile, stride in ranges:
            along = np.arange(lo // tile, -(-hi // tile), dtype=np.int64) * stride
            indexes = (indexes[:, None] + along[None, :]).reshape(-1)
        tile_offsets, tile_sizes = self.boxes(indexes)
        offsets = np.maximum(tile_offsets, np.array(box.offset, np.int64))
        sizes = np.minimum(tile_offsets + tile_sizes, np.array(box.end, np.int64)) - offsets
        return TileCuts(indexes, offsets, sizes, np.all(sizes == tile_sizes, axis=1))

    def index_of(self, box: Box) -> int:
        """Return the index of the one tile that holds ``box``.

        Raises:
            LayoutError: if the box is empty, reaches into several tiles, or does not lie in the tensor.
        """
        self._check_inside(box)
        first = [o // t for o, t in zip(box.offset, self.tile, strict=True)]
        last = [(e - 1) // t for e, t in zip(box.end, self.tile, strict=True)]
        if box.volume == 0 or first != last:
            found = "it is empty" if box.volume == 0 else f"it reaches from tile {tuple(first)} to {tuple(last)}"
            raise LayoutError(f"no one tile of {self} holds {box}: {found}")
        return sum(at * stride for at, stride in zip(first, self._strides, strict=True))

    def _check_inside(self, box: Box) -> None:
        if box.ndim != self.ndim or any(e > n for e, n in zip(box.end, self.shape, strict=True)):
            raise LayoutError(f"{box} does not lie in a tensor of shape {self.shape}")
