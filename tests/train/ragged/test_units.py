from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.errors import LayoutError
from vescale_train.ragged import balanced_units, weighted_units


@given(st.integers(1, 50), st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_no_cut_goes_through_a_block_and_shares_are_even(num_units, num_ranks, blocks):
    unit = math.lcm(*blocks)
    units = balanced_units(num_units * unit, num_ranks, blocks)
    assert sum(units) == num_units
    assert max(units) - min(units) <= 1
    cuts = [sum(units[:rank]) * unit for rank in range(num_ranks)]
    assert all(cut % block == 0 for cut in cuts for block in blocks)


@given(st.integers(1, 1000), st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(lambda w: sum(w) > 0.001))
def test_weights_are_kept_to_less_than_a_unit(num_units, weights):
    units = weighted_units(num_units, weights)
    assert sum(units) == num_units
    for share, weight in zip(units, weights, strict=True):
        assert abs(share - num_units * weight / sum(weights)) < 1 + 1e-6


def test_impossible_shares_are_refused():
    with pytest.raises(LayoutError, match="the least common multiple is 12; pad them to 36"):
        balanced_units(30, 2, (4, 6))
    with pytest.raises(LayoutError, match="in blocks"):
        balanced_units(12, 0)
    with pytest.raises(LayoutError, match="by weights"):
        weighted_units(3, [0.0, 0.0])
