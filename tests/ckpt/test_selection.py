from __future__ import annotations

import pytest

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.selection import box_of


@pytest.mark.parametrize(
    ("selection", "box"),
    [
        (None, Box((0, 0), (10, 4))),
        (Box((1, 1), (2, 3)), Box((1, 1), (2, 3))),
        (slice(2, 5), Box((2, 0), (3, 4))),
        (slice(-3, None), Box((7, 0), (3, 4))),
        ((slice(None), slice(1, 2)), Box((0, 1), (10, 1))),
        ((slice(5, 2),), Box((5, 0), (0, 4))),
        ((), Box((0, 0), (10, 4))),
    ],
)
def test_selections(selection, box):
    assert box_of(selection, (10, 4), "w") == box


@pytest.mark.parametrize(
    "selection",
    [
        Box((9, 0), (2, 4)),
        Box((0,), (10,)),
        slice(0, 10, 2),
        slice(None, None, -1),
        (slice(None), slice(None), slice(None)),
    ],
)
def test_what_is_no_box_of_the_tensor_is_refused_by_name(selection):
    with pytest.raises(InvalidInputError, match="'w'"):
        box_of(selection, (10, 4), "w")


def test_a_tensor_without_dims():
    assert box_of(None, (), "w") == Box((), ())
