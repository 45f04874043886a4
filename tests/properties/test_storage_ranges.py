from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vescale_storage.ranges import coalesce

RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=40)


@given(RANGES, st.integers(0, 30), st.integers(0, 120))
def test_every_range_lies_in_exactly_one_span_and_every_bound_holds(ranges, max_gap_bytes, max_bytes):
    spans = coalesce(ranges, max_gap_bytes, max_bytes)
    assert sorted(index for span in spans for index in span.members) == list(range(len(ranges)))
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    for span in spans:
        inside = [ranges[index] for index in span.members]
        assert all(span.start <= start and start + length <= span.stop for start, length in inside)
        # Nothing is read that no member needs, but gaps of the allowed size.
        assert span.start == min(start for start, _ in inside)
        assert span.stop == max(start + length for start, length in inside)
        assert span.length <= max(max_bytes, *(length for _, length in inside))
        end = span.start
        for start, length in sorted(inside):
            assert start - end <= max_gap_bytes
            end = max(end, start + length)


@given(RANGES, st.integers(0, 30))
def test_without_a_bound_of_size_no_two_spans_could_be_joined(ranges, max_gap_bytes):
    spans = coalesce(ranges, max_gap_bytes, 10**9)
    for before, after in itertools.pairwise(spans):
        assert after.start - before.stop > max_gap_bytes
