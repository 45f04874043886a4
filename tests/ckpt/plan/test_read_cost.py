from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.errors import ConfigError
from vescale_ckpt.plan.read_cost import RECORD_BYTES, ReadCost

GIB = 1 << 30
LOCAL = ReadCost(rank_bytes_per_second=3e9, storage_bytes_per_second=math.inf, link_bytes_per_second=1e9)
"""A fast disk on each host, or the page cache, and gloo between them."""
OBJECTS = ReadCost(rank_bytes_per_second=0.3e9, storage_bytes_per_second=10e9, link_bytes_per_second=2e9)
"""An object store that serves many, and each of them slowly."""

rates = st.floats(1e3, 1e12)
costs = st.builds(
    ReadCost,
    rank_bytes_per_second=rates,
    storage_bytes_per_second=rates,
    link_bytes_per_second=rates,
    exchange_seconds=st.floats(0, 1),
)
ranks, sizes = st.integers(2, 4096), st.integers(0, 1 << 50)


@pytest.mark.parametrize(("cost", "shares"), [(ReadCost(), True), (LOCAL, False), (OBJECTS, True)])
@pytest.mark.parametrize("num_ranks", [2, 32, 4096])
def test_what_is_faster_is_done(cost, num_ranks, shares):
    assert cost.shares(num_ranks, GIB) is shares


def test_two_ranks_read_what_thirty_two_exchange():
    """A link no faster than the disk pays when there are many to share with, if the disk is one for all."""
    cost = ReadCost(rank_bytes_per_second=2e9, storage_bytes_per_second=6e9, link_bytes_per_second=1e9)
    assert not cost.shares(2, GIB)
    assert cost.shares(32, GIB)
    assert cost.direct_seconds(2, 6_000_000_000) == 3.0
    assert cost.shared_seconds(2, 6_000_000_000) == 1.5 + 3.0
    assert cost.direct_seconds(32, 6_000_000_000) == 32.0
    assert cost.shared_seconds(32, 6_000_000_000) == pytest.approx(1.0 + 31 / 32 * 6)


def test_what_is_small_is_not_worth_an_exchange():
    cost = ReadCost(exchange_seconds=0.01)
    assert cost.shares(2, GIB)
    assert not cost.shares(2, 1000)


@given(cost=costs, num_ranks=ranks, num_bytes=sizes)
def test_it_never_chooses_the_slower_way(cost, num_ranks, num_bytes):
    direct, shared = cost.direct_seconds(num_ranks, num_bytes), cost.shared_seconds(num_ranks, num_bytes)
    assert cost.shares(num_ranks, num_bytes) == (shared <= direct)
    assert direct >= 0
    assert shared >= cost.exchange_seconds


@given(cost=costs, num_ranks=st.integers(2, 1024), num_bytes=st.integers(1, 1 << 40))
def test_a_faster_link_never_makes_it_read_more(cost, num_ranks, num_bytes):
    faster = ReadCost.decode(cost.encode())
    object.__setattr__(faster, "link_bytes_per_second", 2 * cost.link_bytes_per_second)
    assert faster.shares(num_ranks, num_bytes) >= cost.shares(num_ranks, num_bytes)


@given(cost=costs)
def test_it_is_told_to_others_to_the_bit(cost):
    assert len(cost.encode()) == RECORD_BYTES
    assert ReadCost.decode(cost.encode()) == cost
    assert ReadCost.decode(LOCAL.encode()) == LOCAL


@pytest.mark.parametrize(
    "wrong", [{"link_bytes_per_second": 0}, {"rank_bytes_per_second": -1.0}, {"exchange_seconds": math.nan}]
)
def test_what_is_no_cost_is_refused(wrong):
    with pytest.raises(ConfigError, match="rates are above 0"):
        ReadCost(**wrong)
