from __future__ import annotations

import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box


def test_a_0d_box_holds_one_element() -> None:
    box = Box.whole(())
    assert box == Box((), ())
    assert box.volume == 1
    assert box.end == ()
    assert box.slices == ()
    assert box.intersect(box) == box
    assert box.contains(box)
    assert box.subtract(box) == []


def test_ends_are_past_the_last_element() -> None:
    box = Box((1, 2), (3, 4))
    assert box.end == (4, 6)
    assert box.slices == (slice(1, 4), slice(2, 6))
    assert box.volume == 12
    assert box.ndim == 2


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (Box((0, 0), (4, 4)), Box((2, 3), (4, 4)), Box((2, 3), (2, 1))),
        (Box((0, 0), (4, 4)), Box((4, 0), (1, 4)), None),
        (Box((0, 0), (4, 4)), Box((1, 1), (0, 2)), None),
        (Box((1, 1), (0, 2)), Box((1, 1), (0, 2)), None),
        (Box((0, 0), (4, 4)), Box((1, 1), (2, 2)), Box((1, 1), (2, 2))),
    ],
)
def test_intersect(a: Box, b: Box, common: Box | None) -> None:
    assert a.intersect(b) == common
    assert b.intersect(a) == common


def test_contains_every_empty_box_and_no_larger_one() -> None:
    box = Box((2, 2), (3, 3))
    assert box.contains(Box((0, 0), (0, 9)))
    assert box.contains(Box((2, 4), (3, 1)))
    assert not box.contains(Box((2, 4), (3, 2)))
    assert not box.contains(Box((1, 2), (1, 1)))


def test_subtract_leaves_a_frame() -> None:
    rest = Box((0, 0), (4, 5)).subtract(Box((1, 2), (2, 2)))
    assert rest == [Box((0, 0), (1, 5)), Box((3, 0), (1, 5)), Box((1, 0), (2, 2)), Box((1, 4), (2, 1))]
    assert Box((0,), (3,)).subtract(Box((5,), (2,))) == [Box((0,), (3,))]
    assert Box((0,), (0,)).subtract(Box((5,), (2,))) == []


def test_moving_a_box() -> None:
    box = Box((5, 7), (1, 2))
    assert box.relative_to(Box((4, 7), (9, 9))) == Box((1, 0), (1, 2))
    assert box.shifted((1, -7)) == Box((6, 0), (1, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Box((0,), (1, 2)),
        lambda: Box((-1,), (2,)),
        lambda: Box((1,), (-2,)),
        lambda: Box((1,), (2,)).intersect(Box((), ())),
        lambda: Box((1,), (2,)).contains(Box((), ())),
        lambda: Box((1,), (2,)).relative_to(Box((2,), (2,))),
        lambda: Box((1,), (2,)).relative_to(Box((), ())),
        lambda: Box((1,), (2,)).shifted((-2,)),
        lambda: Box((1,), (2,)).shifted(()),
    ],
)
def test_what_does_not_fit_is_refused(wrong) -> None:
    with pytest.raises(LayoutError, match=r"\d"):
        wrong()
