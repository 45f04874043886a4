from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.geometry.box import Box
from vescale_train.rng import fill as module
from vescale_train.rng.fill import box_words, fill, runs
from vescale_train.rng.philox import host_words
from vescale_train.rng.place import Piece, Place, place_of_plain

KEY = (7, 2**63 + 5)
CPU = torch.device("cpu")


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, Box(offset, extent)


def whole_words(shape, width):
    return torch.tensor(host_words(KEY, 0, width * math.prod(shape)).tolist()).view(*shape, width)


@given(boxes())
def test_runs_are_the_elements_of_a_box_in_order(case):
    shape, box = case
    starts, length = runs(shape, box)
    got = [start + i for start in starts.tolist() for i in range(length)]
    assert got == torch.arange(math.prod(shape)).view(shape)[box.slices].flatten().tolist()


@given(boxes(), st.sampled_from([1, 2]), st.sampled_from([2, 5, 1 << 15]), st.sampled_from([0, 1024]))
def test_a_part_has_the_words_of_its_place_in_the_whole(case, width, chunk, gap):
    shape, box = case
    before = module.CHUNK_WORDS, module.GAP_WORDS
    module.CHUNK_WORDS, module.GAP_WORDS = chunk, gap
    try:
        got = torch.cat(list(box_words(KEY, shape, box, width, CPU)))
    finally:
        module.CHUNK_WORDS, module.GAP_WORDS = before
    assert torch.equal(got, whole_words(shape, width)[box.slices].flatten())


@given(boxes(), st.sampled_from([1, 2]))
def test_what_other_devices_compute_is_the_same(case, width):
    shape, box = case
    starts, length = runs(shape, box)
    got = module._device(KEY, starts * width, length * width, CPU)
    assert torch.equal(got, whole_words(shape, width)[box.slices].flatten())


def test_memory_of_any_order_is_written_by_the_index_of_the_element():
    plain, turned = torch.empty(5, 4), torch.empty(4, 5).t()
    for tensor in (plain, turned):
        fill(place_of_plain(tensor), KEY, lambda words: words % 1000)
    assert torch.equal(plain, turned)


def test_empty_memory_is_left():
    fill(place_of_plain(torch.empty(0, 3)), KEY, lambda words: words)
    fill(Place((4,), (Piece(Box((2,), (0,)), torch.empty(0)),)), KEY, lambda words: words)


def test_large_tensors_are_written_whole_in_parts():
    large = torch.empty(3, module.CHUNK_WORDS + 7, dtype=torch.int64)
    fill(place_of_plain(large), KEY, lambda words: words)
    assert large.view(-1).tolist() == host_words(KEY, 0, large.numel()).tolist()
