from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.emulate.gloo import addition_order, all_reduce, chunk_elements, reduce_scatter
from vescale_train.errors import InvalidInputError


@given(st.integers(0, 10_000_000), st.sampled_from([1, 2, 4, 8]), st.integers(2, 64))
def test_the_chunks_cover_the_buffer(numel, element_bytes, num_ranks):
    assert chunk_elements(numel, element_bytes, num_ranks) * num_ranks >= numel


@given(st.integers(2, 16), st.data())
def test_each_rank_is_added_once_and_the_owner_of_a_chunk_last(num_ranks, data):
    chunk = data.draw(st.integers(0, num_ranks - 1))
    order = addition_order(chunk, num_ranks)
    assert sorted(order) == list(range(num_ranks))
    assert order[-1] == chunk


def test_the_sum_is_right_and_the_tensors_stay_as_they_are():
    tensors = [torch.full((3, 5), float(rank)) for rank in range(4)]
    assert torch.equal(all_reduce(tensors), torch.full((3, 5), 6.0))
    assert [t[0, 0].item() for t in tensors] == [0, 1, 2, 3]


def test_bits_depend_on_the_place_in_the_buffer():
    values = [1e8, 1.0, -1e8]
    total = all_reduce([torch.full((30,), v) for v in values])
    assert total.unique().numel() > 1


def test_a_rank_keeps_its_slice():
    tensors = [torch.arange(12.0).reshape(6, 2) + rank for rank in range(3)]
    parts = [reduce_scatter(tensors, rank) for rank in range(3)]
    assert torch.equal(torch.cat(parts), all_reduce(tensors))


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidInputError, match="one tensor a rank"):
        all_reduce([])
    with pytest.raises(InvalidInputError, match="all of one shape and dtype"):
        all_reduce([torch.ones(2), torch.ones(3)])
    with pytest.raises(InvalidInputError, match="does not divide by 2 ranks"):
        reduce_scatter([torch.ones(3), torch.ones(3)], 0)
