from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.flat import box_to_flat_ranges, flat_to_boxes
from vescale_ckpt.geometry.tile_cover import check_tile_cover
from vescale_ckpt.geometry.tiles import TileGrid, tile_shape

small_shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
large_shapes = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 70_000)), max_size=5).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def shapes_and_boxes(draw: st.DrawFn, num: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(small_shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(num)]


@st.composite
def grids(draw: st.DrawFn) -> TileGrid:
    shape = draw(small_shapes)
    return TileGrid(shape, tuple(draw(st.integers(1, 10)) for _ in shape))


def mask(shape: tuple[int, ...], box: Box | None) -> np.ndarray:
    found = np.zeros(shape, bool)
    if box is not None:
        found[box.slices] = True
    return found


@settings(max_examples=150, deadline=None)
@given(shapes_and_boxes(3))
def test_box_algebra_is_set_algebra(drawn) -> None:
    shape, (a, b, c) = drawn
    common = a.intersect(b)
    assert common == b.intersect(a)
    np.testing.assert_array_equal(mask(shape, common), mask(shape, a) & mask(shape, b))
    left = common.intersect(c) if common else None
    other = b.intersect(c)
    assert left == (a.intersect(other) if other else None)
    assert a.contains(b) == (not (mask(shape, b) & ~mask(shape, a)).any())
    rest = a.subtract(b)
    np.testing.assert_array_equal(
        sum((mask(shape, box).astype(int) for box in rest), np.zeros(shape, int)),
        (mask(shape, a) & ~mask(shape, b)).astype(int),
    )
    if common:
        assert common.relative_to(a).shifted(a.offset) == common
        np.testing.assert_array_equal(mask(shape, a)[a.slices][common.relative_to(a).slices], True)


@settings(max_examples=150, deadline=None)
@given(grids())
def test_tiles_partition_a_tensor(grid) -> None:
    boxes = [grid.box(i) for i in range(grid.num_tiles)]
    assert all(box.volume for box in boxes)
    assert check_cover(grid.shape, boxes).ok
    assert [grid.index_of(box) for box in boxes] == list(range(grid.num_tiles))
    offsets, sizes = grid.boxes(np.arange(grid.num_tiles))
    assert list(map(tuple, offsets.tolist())) == [box.offset for box in boxes]
    assert list(map(tuple, sizes.tolist())) == [box.shape for box in boxes]
    assert check_tile_cover(grid.shape, grid.tile, np.arange(grid.num_tiles)).ok


@settings(max_examples=150, deadline=None)
@given(grids(), st.data())
def test_a_cut_partitions_a_box_along_the_tiles(grid, data) -> None:
    box = data.draw(boxes_in(grid.shape))
    parts = list(grid.cut(box))
    assert parts == [(i, both) for i in range(grid.num_tiles) if (both := grid.box(i).intersect(box))]
    cuts = grid.cut_columns(box)
    assert cuts.indexes.tolist() == [i for i, _ in parts]
    assert list(map(tuple, cuts.offsets.tolist())) == [part.offset for _, part in parts]
    assert list(map(tuple, cuts.sizes.tolist())) == [part.shape for _, part in parts]
    assert cuts.whole.tolist() == [part == grid.box(i) for i, part in parts]


@settings(max_examples=300, deadline=None)
@given(large_shapes, st.sampled_from([1, 2, 4, 8, 16]))
def test_the_canonical_cut_keeps_its_bounds(shape, item_bytes) -> None:
    if math.prod(shape) * item_bytes >= 1 << 63:
        return
    tile = tile_shape(shape, item_bytes)
    grid = TileGrid(shape, tile)
    total = math.prod(shape) * item_bytes
    if total == 0:
        assert grid.num_tiles == 0
        return
    assert math.prod(tile) * item_bytes <= max(256 << 10, min(4 << 20, total // 256))
    for n, t in zip(shape, tile, strict=True):
        assert any(t == -(-n // (1 << k)) for k in range(n.bit_length() + 1))
    cut = [d for d, (n, t) in enumerate(zip(shape, tile, strict=True)) if t < n]
    if cut:
        assert math.prod(tile[cut[-1] :]) * item_bytes >= 512
    # Rounding up costs less than a factor of two per dim that was cut, so a tile is never a crumb.
    assert math.prod(tile) * item_bytes > (total // grid.num_tiles) / 2


@settings(max_examples=200, deadline=None)
@given(small_shapes, st.data())
def test_a_flat_range_is_its_boxes_in_order(shape, data) -> None:
    volume = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, volume)), data.draw(st.integers(0, volume))))
    boxes = flat_to_boxes(shape, start, stop)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    numbers = np.arange(volume).reshape(shape)
    found = list(itertools.chain.from_iterable(numbers[box.slices].reshape(-1).tolist() for box in boxes))
    assert found == list(range(start, stop))
    assert all(len(box_to_flat_ranges(shape, box)) == 1 for box in boxes)


@settings(max_examples=200, deadline=None)
@given(shapes_and_boxes(1))
def test_a_box_is_its_flat_ranges(drawn) -> None:
    shape, (box,) = drawn
    ranges = box_to_flat_ranges(shape, box)
    flat = np.zeros(math.prod(shape), int)
    for start, stop in ranges:
        flat[start:stop] += 1
    np.testing.assert_array_equal(flat.reshape(shape), mask(shape, box).astype(int))
    assert (ranges[1:, 0] > ranges[:-1, 1]).all()


@settings(max_examples=200, deadline=None)
@given(small_shapes, st.data())
def test_a_cover_report_is_exact(shape, data) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=8))
    report = check_cover(shape, boxes, limit=100_000)
    counts = sum((mask(shape, box).astype(int) for box in boxes), np.zeros(shape, int))
    missing = sum((mask(shape, box).astype(int) for box in report.missing), np.zeros(shape, int))
    np.testing.assert_array_equal(missing, (counts == 0).astype(int))
    pairs = itertools.combinations(range(len(boxes)), 2)
    assert list(report.overlaps) == [(i, j) for i, j in pairs if boxes[i].intersect(boxes[j])]
    assert report.ok == bool((counts == 1).all())
    assert not report.truncated
