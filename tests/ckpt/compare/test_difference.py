from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.compare.difference import Difference, is_comparable
from vescale_ckpt.errors import InvalidInputError


def of(a, b, offset=None):
    found = Difference()
    found.add(a, b, offset or (0,) * a.ndim)
    return found


def test_the_same_bits():
    found = of(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]))
    assert (found.num, found.num_different, found.same_bits, found.at) == (2, 0, True, None)


def test_where_and_how_far():
    a, b = torch.zeros(3, 4), torch.zeros(3, 4)
    a[1, 2], b[1, 2], b[0, 1] = 4.0, 1.0, 0.5
    found = of(a, b, (10, 20))
    assert (found.num_different, found.max_abs, found.max_rel, found.at) == (2, 3.0, 1.0, (11, 22))


def test_zeros_of_both_signs_are_equal_and_not_the_same():
    found = of(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.num_different, found.same_bits) == (0, False)


@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (math.inf, -math.inf), (math.inf, 1.0)])
def test_what_is_no_number_on_one_side_is_infinitely_far(a, b):
    found = of(torch.tensor([a]), torch.tensor([b]))
    assert (found.num_different, found.max_abs, found.max_rel) == (1, math.inf, math.inf)


def test_infinities_and_nans_that_agree_do_not_count():
    a = torch.tensor([math.inf, math.nan, 1.0])
    found = of(a, torch.tensor([math.inf, math.nan, 2.0]))
    assert (found.num_different, found.max_abs, found.max_rel) == (1, 1.0, 0.5)


def test_large_integers_are_compared_exactly():
    found = of(torch.tensor([2**60, 5]), torch.tensor([2**60 + 1, 5]))
    assert found.num_different == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_of_equal_values(dtype):
    found = of(torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.0]).to(dtype))
    assert (found.num_different, found.same_bits) == (0, False)


def test_complex_numbers():
    found = of(torch.tensor([3 + 4j, 1 + 0j]), torch.tensor([0j, 1 + 0j]))
    assert (found.num_different, found.max_abs, found.at) == (1, 5.0, (0,))
    assert of(torch.tensor([1 + 0j]), torch.tensor([1.0])).num_different == 0


def test_what_cannot_be_converted_can_only_be_the_same():
    four = torch.tensor([1, 2], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert of(four, four).same_bits
    with pytest.raises(InvalidInputError):
        of(four, torch.tensor([1, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert not is_comparable(four.dtype, four.dtype)
    assert is_comparable(torch.bool, torch.complex64)


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=1, max_size=12), st.integers(1, 11))
def test_blocks_add_up_to_the_whole(pairs, cut):
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    whole, parts = of(a, b), Difference()
    parts.add(a[:cut], b[:cut], (0,))
    parts.add(a[cut:], b[cut:], (cut,))
    assert parts == whole
