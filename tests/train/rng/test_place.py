from __future__ import annotations

import pytest
import torch

from vescale_ckpt.geometry.box import Box
from vescale_train.errors import InvalidInputError, LayoutError
from vescale_train.rng.place import Cut, place_of_plain


def test_a_plain_tensor_is_whole():
    place = place_of_plain(torch.empty(2, 3))
    assert (place.shape, place.pieces[0].box) == ((2, 3), Box((0, 0), (2, 3)))


def test_a_cut_puts_a_tensor_into_a_larger_one_by_elements_of_any_width():
    cut = Cut(0, 2, 3, 10)
    for rows, shape, offset in ((3, (10, 4), (2, 0)), (6, (20, 4), (4, 0)), (15, (50, 4), (10, 0))):
        place = place_of_plain(torch.empty(rows, 4)).within([cut])
        assert place.shape == shape
        assert place.pieces[0].box == Box(offset, (rows, 4))


def test_cuts_of_several_dims_add_up():
    place = place_of_plain(torch.empty(3, 2, 5)).within([Cut(0, 2, 3, 10), Cut(1, 4, 2, 8)])
    assert place.shape == (10, 8, 5)
    assert place.pieces[0].box == Box((2, 4, 0), (3, 2, 5))


def test_a_tensor_without_the_dim_is_the_same_everywhere():
    assert place_of_plain(torch.empty(())).within([Cut(0, 2, 3, 10)]).shape == ()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_tensor_that_does_not_divide_is_refused(rows):
    with pytest.raises(LayoutError, match=r"dim 0 does not divide into the 3 elements.*rng.shared"):
        place_of_plain(torch.empty(rows, 4)).within([Cut(0, 2, 3, 10)])


@pytest.mark.parametrize("cut", [(-1, 0, 1, 1), (0, -1, 1, 2), (0, 2, 3, 4), (0, 0, 0, 4)])
def test_a_cut_is_a_part(cut):
    with pytest.raises(InvalidInputError, match="are no part"):
        Cut(*cut)
