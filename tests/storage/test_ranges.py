from __future__ import annotations

import pytest

from vescale_storage.errors import ConfigError
from vescale_storage.ranges import Span, coalesce


def test_neighbours_within_the_gap_share_a_span():
    assert coalesce([(0, 10), (10, 5), (20, 5), (100, 1)], 5, 1000) == [Span(0, 25, (0, 1, 2)), Span(100, 1, (3,))]
    assert coalesce([(0, 10), (10, 5), (20, 5)], 4, 1000) == [Span(0, 15, (0, 1)), Span(20, 5, (2,))]
    assert coalesce([(0, 10), (11, 1)], 0, 1000) == [Span(0, 10, (0,)), Span(11, 1, (1,))]


def test_order_of_input_does_not_matter_and_members_say_which():
    assert coalesce([(20, 5), (0, 10), (10, 10)], 0, 1000) == [Span(0, 25, (1, 2, 0))]


def test_spans_are_bounded_but_a_range_is_never_cut():
    assert coalesce([(0, 6), (6, 6), (12, 6)], 0, 12) == [Span(0, 12, (0, 1)), Span(12, 6, (2,))]
    assert coalesce([(0, 5), (5, 50), (55, 5)], 0, 12) == [Span(0, 5, (0,)), Span(5, 50, (1,)), Span(55, 5, (2,))]


def test_ranges_inside_a_span_add_nothing_and_join_whatever_its_size():
    assert coalesce([(0, 50), (10, 5), (49, 1), (50, 0)], 0, 12) == [Span(0, 50, (0, 1, 2, 3))]
    assert coalesce([(0, 4), (0, 4), (2, 4)], 0, 100) == [Span(0, 6, (0, 1, 2))]
    assert coalesce([(0, 8), (4, 8)], 0, 8) == [Span(0, 8, (0,)), Span(4, 8, (1,))]


def test_empty_ranges_and_no_ranges():
    assert coalesce([], 10, 10) == []
    assert coalesce([(7, 0)], 10, 10) == [Span(7, 0, (0,))]
    assert Span(7, 3, ()).stop == 10


@pytest.mark.parametrize(
    "arguments", [([(-1, 5)], 0, 10), ([(0, -5)], 0, 10), ([], -1, 10), ([], 0, -10), ([(0, 1), (3, -1)], 5, 10)]
)
def test_negative_numbers_are_refused(arguments):
    with pytest.raises(ConfigError):
        coalesce(*arguments)
