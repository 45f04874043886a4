from __future__ import annotations

import itertools
import math
import random
import time

import numpy as np
import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry import cover
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.flat import flat_to_boxes
from vescale_ckpt.geometry.tiles import TileGrid


def by_hand(shape, boxes, report) -> None:
    """Compare a report that is not truncated with counting every element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    missing = np.zeros(shape, int)
    for box in report.missing:
        assert box.volume
        missing[box.slices] += 1
    np.testing.assert_array_equal(missing, (counts == 0).astype(int))
    pairs = {(i, j) for j in range(len(boxes)) for i in range(j) if boxes[i].intersect(boxes[j])}
    assert set(report.overlaps) == pairs
    assert len(report.overlaps) == len(pairs)
    assert report.ok == bool((counts == 1).all())


def test_a_partition_is_ok() -> None:
    boxes = [Box((0, 0), (2, 5)), Box((2, 0), (2, 2)), Box((2, 2), (2, 3)), Box((9, 9), (0, 4))]
    report = check_cover((4, 5), boxes)
    assert report.ok
    assert report == cover.CoverReport()


def test_missing_and_overlapping_are_named() -> None:
    boxes = [Box((0, 0), (3, 5)), Box((2, 0), (2, 2)), Box((3, 4), (1, 1))]
    report = check_cover((4, 5), boxes)
    assert report.missing == (Box((3, 2), (1, 2)),)
    assert report.overlaps == ((0, 1),)
    assert not report.ok
    assert not report.truncated


def test_no_boxes_and_no_elements() -> None:
    assert check_cover((4, 5), []).missing == (Box((0, 0), (4, 5)),)
    assert check_cover((4, 0), []).ok
    assert check_cover((), []).missing == (Box((), ()),)
    assert check_cover((), [Box((), ())]).ok
    assert check_cover((), [Box((), ()), Box((), ())]).overlaps == ((0, 1),)


def test_a_box_outside_is_named_and_covers_nothing() -> None:
    report = check_cover((4,), [Box((0,), (4,)), Box((2,), (3,)), Box((2**70,), (2**70,))])
    assert report.outside == (1, 2)
    assert not report.overlaps
    assert not report.ok


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(LayoutError, match="dims"):
        check_cover((4,), [Box((), ())])
    with pytest.raises(LayoutError, match="2\\^63"):
        check_cover((2**63,), [])


def test_a_limit_cuts_the_report_and_says_so() -> None:
    boxes = [Box((i,), (1,)) for i in range(0, 100, 2)]
    report = check_cover((100,), boxes, limit=3)
    assert report.missing == (Box((1,), (1,)), Box((3,), (1,)), Box((5,), (1,)))
    assert report.truncated
    same = [Box((0,), (100,))] * 30
    report = check_cover((100,), same, limit=5)
    assert len(report.overlaps) == 5
    assert report.truncated
    assert not check_cover((100,), same, limit=1000).truncated
    assert check_cover((4,), [Box((5,), (1,))] * 9, limit=5).truncated


@pytest.mark.parametrize("cells", [1, 8, 1 << 14])
@pytest.mark.parametrize("seed", range(40))
def test_random_boxes_against_counting(monkeypatch, seed, cells) -> None:
    # Few cells per region drive the search through its cutting branch, too.
    monkeypatch.setattr(cover, "_MIN_CELLS", cells)
    monkeypatch.setattr(cover, "_CELLS_PER_BOX", 1)
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
    boxes = []
    for _ in range(rng.randint(0, 12)):
        offset = tuple(rng.randrange(n) for n in shape)
        boxes.append(Box(offset, tuple(rng.randint(0, n - o) for o, n in zip(offset, shape, strict=True))))
    by_hand(shape, boxes, check_cover(shape, boxes, limit=10_000))


@pytest.mark.parametrize("seed", range(20))
def test_random_partitions_with_one_fault(seed) -> None:
    rng = random.Random(seed)
    shape = (rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9))
    cuts = sorted({0, math.prod(shape), *(rng.randrange(math.prod(shape)) for _ in range(6))})
    boxes = [box for a, b in itertools.pairwise(cuts) for box in flat_to_boxes(shape, a, b)]
    assert check_cover(shape, boxes).ok
    rng.shuffle(boxes)
    lost = boxes.pop()
    report = check_cover(shape, boxes)
    by_hand(shape, boxes, report)
    assert sum(box.volume for box in report.missing) == lost.volume
    boxes += [lost, lost]
    assert check_cover(shape, boxes).overlaps == ((len(boxes) - 2, len(boxes) - 1),)


def _grid_of_100_000() -> tuple[tuple[int, ...], list[Box]]:
    grid = TileGrid((3_200_000, 4096), (10_240, 13))
    return grid.shape, [grid.box(i) for i in range(grid.num_tiles)]


def _flat_ranges_of_25_000() -> tuple[tuple[int, ...], list[Box]]:
    rng = random.Random(7)
    shape = (4096, 64, 4096)
    cuts = sorted({0, math.prod(shape), *(rng.randrange(math.prod(shape)) for _ in range(9_000))})
    return shape, [box for a, b in itertools.pairwise(cuts) for box in flat_to_boxes(shape, a, b)]


@pytest.mark.parametrize("make", [_grid_of_100_000, _flat_ranges_of_25_000])
def test_many_boxes_take_seconds(make) -> None:
    shape, boxes = make()
    assert len(boxes) > 25_000
    start = time.process_time()
    assert check_cover(shape, boxes).ok
    lost = boxes.pop(20_000)
    report = check_cover(shape, boxes)
    assert time.process_time() - start < 20
    assert sum(box.volume for box in report.missing) == lost.volume
    assert all(lost.contains(box) for box in report.missing)
    assert not report.overlaps
