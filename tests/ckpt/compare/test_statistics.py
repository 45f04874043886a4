from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.compare.statistics import Statistics, statistics_of
from vescale_ckpt.errors import InvalidInputError


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), max_size=5))
def test_parts_add_up_to_the_whole(parts):
    together, whole = Statistics(), torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    for part in parts:
        together.add(torch.tensor(part, dtype=torch.float64))
    assert together.num == whole.numel()
    if whole.numel():
        assert together.minimum == whole.min()
        assert together.maximum == whole.max()
        assert math.isclose(together.mean, whole.mean(), rel_tol=1e-9, abs_tol=1e-6)
        assert math.isclose(together.std, whole.std(correction=0), rel_tol=1e-6, abs_tol=1e-3)


def test_what_is_no_number_is_counted_apart():
    found = Statistics()
    found.add(torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, -0.0]))
    assert (found.num, found.num_nan, found.num_infinite, found.num_zero, found.num_finite) == (6, 1, 2, 2, 3)
    assert (found.minimum, found.maximum) == (0.0, 1.0)


def test_nothing():
    found = Statistics()
    found.add(torch.zeros(0))
    assert (found.num, found.std, found.minimum) == (0, 0.0, math.inf)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        (torch.tensor([True, False]), 0.5),
        (torch.tensor([1, 3]), 2),
        (torch.tensor([3 + 4j]), 5),
        (torch.tensor([2.0, 4.0]).to(torch.float8_e5m2), 3),
    ],
)
def test_any_dtype(values, mean):
    found = Statistics()
    found.add(values)
    assert found.mean == mean


def test_what_torch_cannot_convert():
    with pytest.raises(InvalidInputError, match="float4"):
        Statistics().add(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


def test_a_tensor_that_is_read_in_boxes():
    whole = torch.randn(3000, 2500)
    found = statistics_of(lambda box: whole[box.slices], (3000, 2500), 4)
    assert found.num == whole.numel()
    assert math.isclose(found.mean, whole.double().mean(), abs_tol=1e-9)
