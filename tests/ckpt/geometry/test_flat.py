from __future__ import annotations

import math

import numpy as np
import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.flat import box_to_flat_ranges, flat_to_boxes


def test_a_range_becomes_head_body_and_tail() -> None:
    assert flat_to_boxes((4, 5), 3, 17) == [Box((0, 3), (1, 2)), Box((1, 0), (2, 5)), Box((3, 0), (1, 2))]
    assert flat_to_boxes((4, 5), 6, 8) == [Box((1, 1), (1, 2))]
    assert flat_to_boxes((4, 5), 0, 20) == [Box((0, 0), (4, 5))]
    assert flat_to_boxes((4, 5), 7, 7) == []
    assert flat_to_boxes((), 0, 1) == [Box((), ())]
    assert flat_to_boxes((), 1, 1) == []
    assert flat_to_boxes((3, 0), 0, 0) == []


def _fewest(shape: tuple[int, ...], start: int, stop: int) -> int:
    """Return the least number of boxes that are flat ranges one after another, found by trying all cuts."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    best = {start: 0}
    for end in range(start + 1, stop + 1):
        ways = []
        for begin in range(start, end):
            at = np.argwhere((numbers >= begin) & (numbers < end))
            low, high = at.min(axis=0), at.max(axis=0) + 1
            if math.prod((high - low).tolist()) == end - begin:
                ways.append(best[begin] + 1)
        best[end] = min(ways)
    return best[stop]


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 3), (3, 1, 4), (2, 2, 2, 2), (1, 6), (6, 1), (2, 1, 3, 1)])
def test_every_range_is_exact_and_minimal(shape) -> None:
    volume = math.prod(shape)
    numbers = np.arange(volume).reshape(shape)
    for start in range(volume + 1):
        for stop in range(start, volume + 1):
            boxes = flat_to_boxes(shape, start, stop)
            found = [numbers[box.slices].reshape(-1) for box in boxes]
            assert np.concatenate([*found, np.zeros(0, int)]).tolist() == list(range(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
            assert len(boxes) == _fewest(shape, start, stop)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 21)])
def test_a_range_outside_is_refused(start, stop) -> None:
    with pytest.raises(LayoutError, match="does not lie in"):
        flat_to_boxes((4, 5), start, stop)


@pytest.mark.parametrize(
    ("box", "ranges"),
    [
        (Box((0, 0, 0), (2, 3, 4)), [[0, 24]]),
        (Box((1, 1, 0), (1, 2, 4)), [[16, 24]]),
        (Box((0, 1, 0), (2, 1, 4)), [[4, 8], [16, 20]]),
        (Box((0, 1, 1), (2, 2, 2)), [[5, 7], [9, 11], [17, 19], [21, 23]]),
        (Box((0, 1, 1), (2, 0, 2)), []),
    ],
)
def test_a_box_becomes_ranges(box, ranges) -> None:
    assert box_to_flat_ranges((2, 3, 4), box).tolist() == ranges


def test_0d_box_is_one_element() -> None:
    assert box_to_flat_ranges((), Box((), ())).tolist() == [[0, 1]]


@pytest.mark.parametrize("box", [Box((0,), (1,)), Box((0, 0, 1), (2, 3, 4)), Box((3, 0, 0), (0, 1, 1))])
def test_a_box_outside_is_refused(box) -> None:
    with pytest.raises(LayoutError, match="does not lie in"):
        box_to_flat_ranges((2, 3, 4), box)
