import itertools

from hypothesis import given
from hypothesis import strategies as st

from vescale_train.timeline.intervals import subtract, total, union

MOMENTS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS), max_size=8)


def moments(intervals):
    return {moment for start, stop in intervals for moment in range(start, stop)}


@given(INTERVALS)
def test_a_union_has_the_same_moments_once_and_in_order(intervals):
    found = union(intervals)
    assert moments(found) == moments(intervals)
    assert total(found) == len(moments(intervals))
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))


@given(INTERVALS, INTERVALS)
def test_a_difference_has_the_moments_of_the_first_alone(first, second):
    found = subtract(first, second)
    assert moments(found) == moments(first) - moments(second)
    assert total(found) == len(moments(found))
    assert found == sorted(found)
