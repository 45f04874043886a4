from __future__ import annotations

import itertools

import pytest

from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.tiles import TileGrid, tile_shape
from vescale_ckpt.plan.parts import Part, chunks_of, compared_parts, cut_to_size, parts_of, sample_tile
from vescale_ckpt.plan.save_plan import Region

SHAPE = (1000, 700)


def record(shape=SHAPE, item_bytes=4, tile=None):
    return TensorRecord(("w",), "float32", shape, tile or tile_shape(shape, item_bytes))


def grid_of(made):
    return TileGrid(made.shape, made.tile)


def covers(box, parts):
    report = check_cover(box.shape, [part.relative_to(box) for part in parts])
    return report.ok


@pytest.mark.parametrize("most_elements", [1, 1000, 70_000, 200_000, 10**9])
@pytest.mark.parametrize("box", [Box.whole(SHAPE), Box((3, 5), (900, 1)), Box((499, 0), (2, 700)), Box((0, 0), (1, 1))])
def test_a_box_is_cut_along_tile_lines_to_the_size_asked_for(box, most_elements):
    grid = grid_of(record())
    parts = list(cut_to_size(grid, box, most_elements))
    assert covers(box, parts)
    for part in parts:
        assert part.volume <= most_elements or len(list(grid.cut(part))) == 1
        for offset, end, tile, low, high in zip(part.offset, part.end, grid.tile, box.offset, box.end, strict=True):
            assert offset == low or offset % tile == 0
            assert end == high or end % tile == 0


def test_the_leftmost_dim_is_cut_first():
    grid = grid_of(record((1024, 1024), tile=(64, 64)))
    parts = list(cut_to_size(grid, Box.whole((1024, 1024)), 128 * 1024))
    assert [part.shape for part in parts] == [(128, 1024)] * 8


def test_what_has_no_dims_is_one_part():
    grid = grid_of(record(()))
    assert list(cut_to_size(grid, Box((), ()), 100)) == [Box((), ())]
    assert list(cut_to_size(grid, Box((), ()), 0)) == [Box((), ())]


def test_regions_become_parts_in_their_order():
    made = record()
    tile_bytes = made.tile[0] * made.tile[1] * 4
    regions = [
        Region(0, Box((0, 0), (600, 700)), None),
        Region(
            0, Box((600, 0), (400, 700)), tuple(tile for tile, _ in grid_of(made).cut(Box((600, 0), (400, 700))))[1:]
        ),
    ]
    parts = list(parts_of(regions, [made], [4], tile_bytes))
    assert all(part.stored and part.box.volume * 4 <= tile_bytes for part in parts)
    first = [part.box for part in parts if Box((0, 0), (600, 700)).contains(part.box)]
    assert covers(Box((0, 0), (600, 700)), first)
    rest = [part.box for part in parts[len(first) :]]
    assert [next(iter(grid_of(made).cut(box)))[0] for box in rest] == list(regions[1].tiles)
    assert all(box.offset[0] >= 600 for box in rest)


def test_item_sizes_count_in_the_size_of_parts():
    shape = (1 << 20,)
    one, eight = (
        list(parts_of([Region(0, Box.whole(shape), None)], [record(shape, width)], [width], 1 << 20))
        for width in (1, 8)
    )
    assert (len(one), len(eight)) == (1, 8)


def test_tiles_that_a_box_does_not_touch_are_left_out():
    made = record((10, 10), tile=(5, 5))
    assert list(parts_of([Region(0, Box((0, 0), (5, 10)), (1, 2))], [made], [4], 1000)) == [
        Part(0, Box((0, 5), (5, 5)), stored=True)
    ]


@pytest.mark.parametrize("box", [Box.whole(SHAPE), Box((1, 1), (998, 698)), Box((0, 0), (500, 700))])
def test_a_part_is_cut_into_one_chunk_for_each_tile_that_it_touches(box):
    made = record()
    chunks = list(chunks_of(Part(0, box, stored=True), made))
    assert covers(box, [chunk.box for chunk in chunks])
    assert [chunk.tile for chunk in chunks] == sorted({tile for tile, _ in grid_of(made).cut(box)})
    for chunk in chunks:
        tile = grid_of(made).box(chunk.tile)
        assert tile.contains(chunk.box)
        assert chunk.whole_tile == (chunk.box == tile)
    assert all(chunk.whole_tile for chunk in chunks) == (box.offset == (0, 0))


def test_a_scalar_is_one_whole_chunk():
    (chunk,) = chunks_of(Part(3, Box((), ()), stored=False), record(()))
    assert (chunk.tensor, chunk.tile, chunk.whole_tile, chunk.stored) == (3, 0, True, False)


def test_copies_that_this_rank_does_not_write_are_hashed_tile_by_tile():
    small, large, none = record((8,), tile=(8,)), record((10, 10), tile=(5, 5)), record((0, 3), tile=(1, 3))
    records = [small, large, small, none]
    regions = [Region(1, Box.whole((10, 10)), (1, 3)), Region(2, Box.whole((8,)), None)]
    few = list(compared_parts([0, 1, 2, 3], regions, records, every=False))
    sample = Part(1, grid_of(large).box(sample_tile(large)), stored=False)
    assert few == [Part(0, Box.whole((8,)), stored=False), sample], "one that is written is hashed so"
    every = list(compared_parts([0, 1, 2, 3], regions, records, every=True))
    assert every == [few[0], *(Part(1, grid_of(large).box(tile), stored=False) for tile in (0, 2))]
    writes_it = [Region(1, Box.whole((10, 10)), (sample_tile(large),))]
    assert list(compared_parts([1], writes_it, records, every=False)) == []


def test_written_and_compared_parts_are_all_tiles_once():
    made = record((90, 70), tile=(20, 20))
    grid = grid_of(made)
    for chosen in itertools.islice(itertools.combinations(range(grid.num_tiles), 4), 0, None, 97):
        regions = [Region(0, Box.whole((90, 70)), chosen)]
        parts = [*parts_of(regions, [made], [4], 1), *compared_parts([0], regions, [made], every=True)]
        assert covers(Box.whole((90, 70)), [part.box for part in parts])
        assert sum(part.stored for part in parts) == 4
