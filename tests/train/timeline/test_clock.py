import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.errors import InvalidInputError
from vescale_train.timeline.clock import NO_OFFSET, Alignment, Exchange, Offset, estimate, measure

NS = st.integers(0, 10**9)
OFFSET = st.integers(-(10**15), 10**15)


@given(OFFSET, st.lists(st.tuples(NS, NS, NS, NS), min_size=1, max_size=8))
def test_the_estimate_is_never_wrong_by_more_than_it_says(offset, delays):
    """Whatever the way there, the stay and the way back take, however unlike one another."""
    exchanges, now = [], 10**6
    for pause, there, stay, back in delays:
        sent = now + pause
        received = sent + there + offset
        returned = sent + there + stay + back
        exchanges.append(Exchange(sent_ns=sent, received_ns=received, replied_ns=received + stay, returned_ns=returned))
        now = returned
    found = estimate(exchanges)
    assert abs(found.offset_ns - offset) <= found.error_ns + 1
    assert found.error_ns == (min(there + back for _, there, _, back in delays) + 1) // 2


def test_no_exchange_tells_nothing():
    with pytest.raises(InvalidInputError, match="no exchange"):
        estimate([])


def test_one_measurement_is_a_constant():
    alignment = Alignment().with_measured(Offset(at_ns=100, offset_ns=50, error_ns=3))
    assert [alignment.to_reference(at) for at in (0, 100, 10**12)] == [50, 150, 10**12 + 50]
    assert alignment.error_ns == 3


def test_two_measurements_are_a_line():
    alignment = Alignment().with_measured(Offset(at_ns=0, offset_ns=1000, error_ns=10))
    alignment = alignment.with_measured(Offset(at_ns=1_000_000, offset_ns=2000, error_ns=10))
    assert [alignment.to_reference(at) for at in (0, 500_000, 1_000_000)] == [1000, 501_500, 1_002_000]


def test_what_cannot_be_told_from_no_drift_is_none():
    alignment = Alignment().with_measured(Offset(at_ns=0, offset_ns=1000, error_ns=10))
    alignment = alignment.with_measured(Offset(at_ns=1_000_000, offset_ns=1012, error_ns=4))
    assert alignment.to_reference(10**9) == 10**9 + 1012
    assert alignment.error_ns == 4


def test_one_process_needs_no_alignment():
    assert measure(None) is NO_OFFSET
    assert Alignment().to_reference(12345) == 12345
