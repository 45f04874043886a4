from __future__ import annotations

import random
import time

import numpy as np
import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry import tile_cover
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.tile_cover import check_tile_cover, check_tile_cover_columns
from vescale_ckpt.geometry.tiles import TileGrid

SHAPE, TILE = (5, 7), (2, 3)


def test_all_tiles_once_is_ok_in_any_order() -> None:
    assert check_tile_cover(SHAPE, TILE, np.array([8, 0, 1, 2, 7, 6, 5, 4, 3], np.uint32)).ok
    assert check_tile_cover((), (), np.array([0])).ok
    assert check_tile_cover((0, 3), (1, 3), np.zeros(0, np.uint32)).ok


def test_parts_that_partition_a_tile_are_ok() -> None:
    tiles = np.array([0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8])
    partial = [(4, Box((2, 3), (1, 3))), (5, Box((3, 3), (1, 1))), (6, Box((3, 4), (1, 2)))]
    assert check_tile_cover(SHAPE, TILE, tiles, partial).ok


def test_missing_tiles_are_named_in_few_boxes() -> None:
    assert check_tile_cover(SHAPE, TILE, np.zeros(0, np.int64)).missing == (Box((0, 0), (5, 7)),)
    assert check_tile_cover(SHAPE, TILE, np.array([0, 1, 2, 8])).missing == (Box((2, 0), (2, 7)), Box((4, 0), (1, 6)))
    assert check_tile_cover((), (), np.zeros(0, np.int64)).missing == (Box((), ()),)


def test_a_tile_twice_is_an_overlap_of_rows() -> None:
    assert check_tile_cover(SHAPE, TILE, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 4])).overlaps == ((4, 9),)


def test_a_tile_and_a_part_of_it_overlap() -> None:
    report = check_tile_cover(SHAPE, TILE, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 4]), [(9, Box((3, 3), (1, 1)))])
    assert report.overlaps == ((4, 9),)
    assert report.missing == ()


def test_parts_that_leave_a_hole_or_overlap_within_the_right_volume() -> None:
    tiles = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 4])
    report = check_tile_cover(SHAPE, TILE, tiles, [(4, Box((2, 3), (1, 3))), (9, Box((3, 3), (1, 2)))])
    assert report.missing == (Box((3, 5), (1, 1)),)
    report = check_tile_cover(SHAPE, TILE, tiles, [(4, Box((2, 3), (2, 2))), (9, Box((2, 4), (1, 2)))])
    assert report.overlaps == ((4, 9),)
    assert report.missing == (Box((3, 5), (1, 1)),)


@pytest.mark.parametrize(
    "box", [Box((2, 3), (2, 4)), Box((1, 3), (2, 3)), Box((0, 0), (5, 7)), Box((2**80, 3), (1, 1))]
)
def test_a_part_that_is_not_in_its_tile_is_outside(box) -> None:
    report = check_tile_cover(SHAPE, TILE, np.arange(9), [(4, box)])
    assert report.outside == (4,)
    assert report.missing == (Box((2, 3), (2, 3)),)


def test_an_empty_part_covers_nothing() -> None:
    report = check_tile_cover(SHAPE, TILE, np.append(np.arange(9), 4), [(9, Box((3, 4), (0, 1)))])
    assert report.ok
    assert check_tile_cover(SHAPE, TILE, np.arange(9), [(4, Box((3, 4), (0, 1)))]).missing == (Box((2, 3), (2, 3)),)


@pytest.mark.parametrize("numbers", [[-(2**63), 2**63 - 1, 2**63 - 1, 1], [2, 3, -1, 1], [2, 3, 2**63 - 1, 2**63 - 1]])
def test_hostile_numbers_are_outside(numbers) -> None:
    report = check_tile_cover_columns(SHAPE, TILE, np.arange(9), np.array([4]), np.array([numbers]))
    assert report.outside == (4,)
    unsigned = np.array([numbers]).astype(np.uint64)
    assert check_tile_cover_columns(SHAPE, TILE, np.arange(9), np.array([4], np.uint64), unsigned).outside == (4,)


def test_a_sum_of_volumes_that_wraps_around_does_not_pass() -> None:
    # 8 * 2^62 is 0 in 64 bits: nine copies seem to add up to one tile.
    shape = (2**62,)
    tiles = np.zeros(9, np.int64)
    partial = [(i, Box((0,), (2**62,))) for i in range(9)]
    assert check_tile_cover(shape, shape, tiles, partial).overlaps


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: check_tile_cover(SHAPE, TILE, np.array([9])),
        lambda: check_tile_cover(SHAPE, TILE, np.array([-1])),
        lambda: check_tile_cover((0,), (1,), np.array([0])),
        lambda: check_tile_cover(SHAPE, TILE, np.array([0]), [(1, Box((0, 0), (1, 1)))]),
        lambda: check_tile_cover(SHAPE, TILE, np.array([0]), [(0, Box((0, 0), (1, 1))), (0, Box((1, 0), (1, 1)))]),
        lambda: check_tile_cover(SHAPE, TILE, np.array([0]), [(0, Box((0,), (1,)))]),
    ],
)
def test_rows_that_do_not_exist_are_refused(wrong) -> None:
    with pytest.raises(LayoutError):
        wrong()


@pytest.mark.parametrize("max_pairwise", [0, 2, 64])
@pytest.mark.parametrize("seed", range(60))
def test_random_tables_against_the_general_check(monkeypatch, seed, max_pairwise) -> None:
    monkeypatch.setattr(tile_cover, "_MAX_PAIRWISE", max_pairwise)
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))
    grid = TileGrid(shape, tuple(rng.randint(1, 5) for _ in shape))
    rows: list[tuple[int, Box]] = []
    for i in range(grid.num_tiles):
        parts = [grid.box(i)]
        for _ in range(rng.choice([0, 0, 1, 3])):
            box = parts.pop(rng.randrange(len(parts)))
            d = rng.randrange(len(shape)) if shape else 0
            at = rng.randint(0, box.shape[d]) if shape else 0
            if not shape:
                parts.append(box)
                continue
            left = Box(box.offset, (*box.shape[:d], at, *box.shape[d + 1 :]))
            parts += [left, *box.subtract(left)] if at else [box]
        rows += [(i, part) for part in parts]
    if seed % 3 == 1:
        rows.pop(rng.randrange(len(rows)))
    if seed % 3 == 2:
        rows.append(rows[rng.randrange(len(rows))])
    rng.shuffle(rows)
    tiles = np.array([i for i, _ in rows], np.uint32)
    partial = [(k, box) for k, (i, box) in enumerate(rows) if box != grid.box(i)]
    report = check_tile_cover(shape, grid.tile, tiles, partial, limit=10_000)
    general = check_cover(shape, [box for _, box in rows], limit=10_000)
    assert report.overlaps == general.overlaps
    missing = np.zeros(shape, int)
    for box in report.missing:
        missing[box.slices] += 1
    for box in general.missing:
        missing[box.slices] -= 1
    assert not missing.any()
    assert report.ok == (seed % 3 == 0)


def test_a_quarter_million_rows_take_seconds() -> None:
    # Every tile is cut in eight by rows, as a data-parallel degree eight times the tiles would.
    grid = TileGrid((32_768, 16_384), (128, 128))
    tiles = np.repeat(np.arange(grid.num_tiles, dtype=np.uint32), 8)
    offsets, sizes = grid.boxes(tiles)
    offsets[:, 0] += np.tile(np.arange(8) * 16, grid.num_tiles)
    sizes[:, 0] = 16
    rows = np.arange(len(tiles))
    boxes = np.concatenate([offsets, sizes], axis=1).astype(np.uint64)
    assert len(rows) == 1 << 18
    start = time.process_time()
    assert check_tile_cover_columns(grid.shape, grid.tile, tiles, rows, boxes).ok
    assert time.process_time() - start < 10
    boxes[12_345, 2] = 15
    report = check_tile_cover_columns(grid.shape, grid.tile, tiles, rows, boxes)
    assert [box.volume for box in report.missing] == [128]


def test_a_huge_grid_is_never_laid_out() -> None:
    report = check_tile_cover((2**40, 2**20), (1, 1), np.arange(1000), limit=2)
    assert report.missing == (Box((0, 1000), (1, 2**20 - 1000)), Box((1, 0), (2**40 - 1, 2**20)))
