from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tiles import tile_shape
from vescale_ckpt.interop.safetensors.bands import bands


def test_a_small_tensor_is_one_band():
    assert list(bands((4, 6), (4, 6), 4, 96)) == [Box((0, 0), (4, 6))]
    assert list(bands((), (), 4, 1)) == [Box((), ())]


def test_nothing_of_a_tensor_without_elements():
    assert list(bands((3, 0, 4), (3, 1, 4), 4, 96)) == []


def test_bands_end_on_tile_lines():
    assert [box.shape[0] for box in bands((100, 8), (16, 8), 1, 40 * 8)] == [32, 32, 36]
    assert [box.shape[0] for box in bands((100, 8), (16, 8), 1, 20 * 8)] == [16] * 5 + [20]
    assert [box.shape[0] for box in bands((100, 8), (16, 8), 1, 10 * 8)] == [10, 6] * 5 + [10, 10]


def test_a_row_that_is_too_long_is_cut_itself():
    boxes = list(bands((2, 10), (1, 4), 4, 20))
    assert [(box.offset, box.shape) for box in boxes[:3]] == [((0, 0), (1, 4)), ((0, 4), (1, 4)), ((0, 8), (1, 2))]
    assert len(boxes) == 6


def test_an_element_larger_than_the_bound_is_a_band():
    assert len(list(bands((2, 2), (2, 2), 16, 1))) == 4


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 64), st.data())
@settings(max_examples=200, deadline=None)
def test_bands_are_the_tensors_bytes_in_order(shape, max_items, data):
    tile = [data.draw(st.integers(1, size)) for size in shape]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = list(bands(tuple(shape), tuple(tile), 4, 4 * max_items))
    assert all(box.volume <= max_items for box in found)
    flat = [numbers[box.slices].reshape(-1) for box in found]
    assert np.array_equal(np.concatenate(flat), np.arange(numbers.size))


def test_usual_tensors_are_read_once():
    for shape in [(128_256, 4096), (4096, 14_336), (8, 4096, 14_336), (50_000_000,)]:
        tile = tile_shape(shape, 2)
        for box in bands(shape, tile, 2, 43 << 20):
            if box.end[0] < shape[0]:
                assert box.end[0] % tile[0] == 0, (shape, tile, box)
