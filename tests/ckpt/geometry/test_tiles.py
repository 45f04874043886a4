from __future__ import annotations

import math
import time

import numpy as np
import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tiles import TileGrid, tile_shape

# The cut is part of the format: a row that changes here breaks the dedup of every store there is.
PINNED = [
    ((4096, 4096), 1, (512, 512), (8, 8)),
    ((4096, 4096), 2, (256, 512), (16, 8)),
    ((4096, 4096), 4, (128, 512), (32, 8)),
    ((4096, 4096), 16, (128, 512), (32, 8)),
    ((1024, 4096), 2, (128, 1024), (8, 4)),
    ((32000, 4096), 2, (1000, 512), (32, 8)),
    ((128256, 4096), 2, (4008, 512), (32, 8)),
    ((11008, 4096), 2, (344, 512), (32, 8)),
    ((4096, 11008), 2, (128, 1376), (32, 8)),
    ((4096, 14336), 2, (128, 1792), (32, 8)),
    ((16384, 53248), 2, (256, 6656), (64, 8)),
    ((16384, 53248), 4, (128, 6656), (128, 8)),
    ((16384, 16384), 2, (512, 2048), (32, 8)),
    ((12288, 49152), 2, (192, 6144), (64, 8)),
    ((50257, 768), 2, (197, 384), (256, 2)),
    ((50257, 768), 4, (393, 192), (128, 4)),
    ((768, 3072), 4, (96, 384), (8, 8)),
    ((768, 768), 4, (192, 192), (4, 4)),
    ((1024,), 4, (1024,), (1,)),
    ((65536,), 4, (65536,), (1,)),
    ((65537,), 4, (32769,), (2,)),
    ((1_000_000, 8), 2, (15625, 8), (64, 1)),
    ((8, 1_000_000), 2, (1, 125_000), (8, 8)),
    ((1_000_003, 17), 4, (1954, 17), (512, 1)),
    ((64, 14336, 4096), 2, (2, 1792, 512), (32, 8, 8)),
    ((256, 2048, 7168), 1, (16, 256, 896), (16, 8, 8)),
    ((512, 512, 3, 3, 3), 2, (64, 64, 3, 3, 3), (8, 8, 1, 1, 1)),
    ((64, 3, 7, 7), 4, (64, 3, 7, 7), (1, 1, 1, 1)),
    ((1280, 1280, 3, 3), 2, (80, 160, 3, 3), (16, 8, 1, 1)),
    ((100_000_000,), 4, (390_625,), (256,)),
    ((1, 1, 2**31), 1, (1, 1, 4 << 20), (1, 1, 512)),
    ((3, 5, 7, 10**6), 8, (1, 1, 1, 250_000), (3, 5, 7, 4)),
    ((2**40,), 2, (2 << 20,), (524_288,)),
    ((1, 1, 1, 4096, 4096), 2, (1, 1, 1, 256, 512), (1, 1, 1, 16, 8)),
    ((), 4, (), ()),
    ((0,), 4, (1,), (0,)),
    ((5, 0, 7), 2, (5, 1, 7), (1, 0, 1)),
    ((0, 2**40), 2, (1, 2**40), (0, 1)),
]


@pytest.mark.parametrize(("shape", "item_bytes", "tile", "counts"), PINNED)
def test_the_cut_is_frozen(shape, item_bytes, tile, counts) -> None:
    assert tile_shape(shape, item_bytes) == tile
    assert TileGrid(shape, tile).counts == counts


@pytest.mark.parametrize(("shape", "item_bytes", "tile", "counts"), PINNED)
def test_tiles_stay_within_their_bounds(shape, item_bytes, tile, counts) -> None:
    tile_bytes, total_bytes = math.prod(tile) * item_bytes, math.prod(shape) * item_bytes
    if total_bytes == 0:
        return
    assert tile_bytes <= max(256 << 10, min(4 << 20, total_bytes // 256))
    last_cut = max((d for d in range(len(shape)) if tile[d] < shape[d]), default=0)
    run_bytes = math.prod(tile[last_cut:]) * item_bytes
    assert run_bytes >= min(512, total_bytes)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(4096, 4096), (11008, 4096), (14336, 4096), (8192, 28672), (16384, 53248)])
def test_usual_shards_of_large_matrices_fall_on_tile_lines(shape, dim, item_bytes, degree) -> None:
    tile = tile_shape(shape, item_bytes)
    assert shape[dim] // degree % tile[dim] == 0


@pytest.mark.parametrize("wrong", [((3, -1), 4), ((3,), 0), ((2**40, 2**40), 1), ((2**62,), 2)])
def test_impossible_tensors_are_refused(wrong) -> None:
    with pytest.raises(LayoutError, match="cannot tile"):
        tile_shape(*wrong)


def test_a_grid_numbers_its_tiles_row_major() -> None:
    grid = TileGrid((5, 7), (2, 3))
    assert grid.counts == (3, 3)
    assert grid.num_tiles == 9
    assert grid.box(0) == Box((0, 0), (2, 3))
    assert grid.box(2) == Box((0, 6), (2, 1))
    assert grid.box(8) == Box((4, 6), (1, 1))
    offsets, sizes = grid.boxes(np.arange(9, dtype=np.uint32))
    assert [Box(tuple(o), tuple(s)) for o, s in zip(offsets.tolist(), sizes.tolist(), strict=True)] == [
        grid.box(i) for i in range(9)
    ]


def test_cutting_a_box() -> None:
    grid = TileGrid((5, 7), (2, 3))
    box = Box((1, 2), (3, 2))
    assert list(grid.cut(box)) == [
        (0, Box((1, 2), (1, 1))),
        (1, Box((1, 3), (1, 1))),
        (3, Box((2, 2), (2, 1))),
        (4, Box((2, 3), (2, 1))),
    ]
    assert list(grid.cut(Box((1, 2), (0, 2)))) == []
    assert [whole for _, whole in zip(range(9), grid.cut_columns(Box.whole((5, 7))).whole, strict=True)] == [True] * 9


@pytest.mark.parametrize(
    "box", [Box((1, 2), (3, 2)), Box((0, 0), (5, 7)), Box((4, 6), (1, 1)), Box((2, 2), (0, 3)), Box((5, 7), (0, 0))]
)
def test_columns_equal_the_iterator(box) -> None:
    grid = TileGrid((5, 7), (2, 3))
    cuts = grid.cut_columns(box)
    rows = zip(cuts.indexes.tolist(), cuts.offsets.tolist(), cuts.sizes.tolist(), cuts.whole.tolist(), strict=True)
    assert [(i, Box(tuple(o), tuple(s)), w) for i, o, s, w in rows] == [
        (i, part, part == grid.box(i)) for i, part in grid.cut(box)
    ]


def test_0d_and_empty_tensors() -> None:
    grid = TileGrid((), ())
    assert grid.num_tiles == 1
    assert grid.box(0) == Box((), ())
    assert list(grid.cut(Box((), ()))) == [(0, Box((), ()))]
    assert grid.cut_columns(Box((), ())).whole.tolist() == [True]
    assert grid.index_of(Box((), ())) == 0
    empty = TileGrid((3, 0), (3, 1))
    assert empty.num_tiles == 0
    assert list(empty.cut(Box((0, 0), (3, 0)))) == []
    assert empty.boxes(np.zeros(0, np.int64))[0].shape == (0, 2)


def test_cutting_touches_only_the_tiles_of_the_box() -> None:
    grid = TileGrid((1 << 30, 1 << 30), (16, 16))
    start = time.process_time()
    parts = list(grid.cut(Box(((1 << 29) + 5, 3), (32, 20))))
    columns = grid.cut_columns(Box(((1 << 29) + 5, 3), (32, 20)))
    assert time.process_time() - start < 1
    assert [i for i, _ in parts] == columns.indexes.tolist()
    assert len(parts) == 6


def test_index_of() -> None:
    grid = TileGrid((5, 7), (2, 3))
    for i in range(grid.num_tiles):
        assert grid.index_of(grid.box(i)) == i
    assert grid.index_of(Box((3, 4), (1, 2))) == 4
    with pytest.raises(LayoutError, match="reaches from tile"):
        grid.index_of(Box((1, 4), (2, 1)))
    with pytest.raises(LayoutError, match="empty"):
        grid.index_of(Box((1, 4), (0, 1)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: TileGrid((5, 7), (2,)),
        lambda: TileGrid((5,), (0,)),
        lambda: TileGrid((-5,), (1,)),
        lambda: TileGrid((2**40, 2**40), (1, 1)),
        lambda: TileGrid((5, 7), (2, 3)).box(9),
        lambda: TileGrid((5, 7), (2, 3)).box(-1),
        lambda: TileGrid((5, 7), (2, 3)).boxes(np.array([9])),
        lambda: TileGrid((5, 7), (2, 3)).boxes(np.array([-1])),
        lambda: list(TileGrid((5, 7), (2, 3)).cut(Box((0, 5), (1, 3)))),
        lambda: TileGrid((5, 7), (2, 3)).cut_columns(Box((0,), (1,))),
        lambda: TileGrid((5, 7), (2, 3)).index_of(Box((5, 5), (1, 1))),
    ],
)
def test_what_does_not_fit_a_grid_is_refused(wrong) -> None:
    with pytest.raises(LayoutError, match=r"\d"):
        wrong()
