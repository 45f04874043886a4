from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.ddp.layout import ALIGNMENT, plan_buckets
from vescale_train.errors import ConfigError

NUMELS = st.lists(st.integers(0, 700), min_size=1, max_size=12)


@given(NUMELS, st.none() | st.integers(1, 900), st.integers(1, 9))
def test_every_parameter_has_one_place_the_last_one_first(numels, bucket_size, num_ranks):
    buckets = plan_buckets(numels, bucket_size=bucket_size, num_ranks=num_ranks)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert [slot.index for slot in slots] == list(reversed(range(len(numels))))
    assert all(slot.numel == numels[slot.index] for slot in slots)
    for bucket in buckets:
        ends = [0, *(slot.stop for slot in bucket.slots)]
        assert all(slot.offset >= end for slot, end in zip(bucket.slots, ends, strict=False))
        assert ends[-1] <= bucket.numel


@given(NUMELS, st.integers(1, 900), st.integers(1, 9))
def test_a_bucket_is_closed_by_the_parameter_that_fills_it(numels, bucket_size, num_ranks):
    *full, _ = plan_buckets(numels, bucket_size=bucket_size, num_ranks=num_ranks)
    for bucket in full:
        assert bucket.slots[-1].stop + ALIGNMENT > bucket_size
        assert bucket.slots[-1].offset < bucket_size


@given(NUMELS, st.integers(1, 900), st.integers(1, 9))
def test_the_shares_of_all_ranks_hold_every_element_once_and_begin_aligned(numels, bucket_size, num_ranks):
    for bucket in plan_buckets(numels, bucket_size=bucket_size, num_ranks=num_ranks):
        share = bucket.shard_numel(num_ranks)
        assert share * num_ranks == bucket.numel
        for slot in bucket.slots:
            held = [bucket.held(slot, rank, num_ranks) for rank in range(num_ranks)]
            elements = [element for start, stop in held for element in range(start, stop)]
            assert elements == list(range(slot.numel))
            assert all(start % ALIGNMENT == 0 for start, _ in held)
            for rank, (start, stop) in enumerate(held):
                inside = rank * share <= slot.offset + start and slot.offset + stop <= (rank + 1) * share
                assert inside or start == stop == 0


@pytest.mark.parametrize(("bucket_size", "num_ranks"), [(0, 1), (5, 0)])
def test_impossible_buckets_are_refused(bucket_size, num_ranks):
    with pytest.raises(ConfigError, match="must be positive"):
        plan_buckets([1], bucket_size=bucket_size, num_ranks=num_ranks)
