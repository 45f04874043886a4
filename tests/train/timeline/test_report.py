import pytest
from hypothesis import given

from tests.train.timeline.test_critical import traces
from vescale_ckpt.errors import InvalidInputError
from vescale_train.timeline.report import analyse
from vescale_train.timeline.span import Kind


@pytest.fixture
def two_ranks(span):
    return [
        span("forward", 0, 0, 2),
        span("reduce", 0, 1, 9, link="g"),
        span("optimizer", 0, 9, 10),
        span("forward", 1, 0, 8),
        span("reduce", 1, 8, 9, link="g"),
        span("checkpoint", 1, 9, 9.5),
    ]


def test_the_window_of_each_rank_is_told_in_parts(two_ranks):
    report = analyse(two_ranks)
    first, second = report.ranks
    ms = 1_000_000
    assert report.window_ns == 10 * ms
    assert (first.computing_ns, first.exposed_ns, first.hidden_ns, first.idle_ns) == (3 * ms, 7 * ms, ms, 0)
    assert (second.computing_ns, second.exposed_ns, second.other_ns) == (8 * ms, ms, ms // 2)
    assert second.idle_ns == ms // 2
    assert first.bubble == pytest.approx(0.7)
    assert second.bubble == pytest.approx(0.2)
    assert report.bubble == pytest.approx(0.45)


def test_who_makes_others_wait_is_told(two_ranks):
    first, second = analyse(two_ranks).ranks
    assert (first.caused_wait_ns, second.caused_wait_ns) == (0, 7_000_000)
    (lag,) = analyse(two_ranks).stragglers
    assert (lag.name, lag.rank, lag.ratio) == ("forward", 1, 4.0)


def test_a_rank_that_lags_is_found_among_many_and_the_worst_comes_first(span):
    spans = [span("forward", rank, 0, 10 if rank != 5 else 13) for rank in range(8)]
    spans += [span("backward", rank, 13, 30 if rank != 2 else 60) for rank in range(8)]
    spans += [span("reduce", rank, 60, 61 + rank) for rank in range(8)]
    assert [(lag.name, lag.rank) for lag in analyse(spans).stragglers] == [("backward", 2), ("forward", 5)]


def test_steps_can_be_chosen(span):
    spans = [span("forward", 0, 10 * step, 10 * step + 5, step=step) for step in range(4)]
    assert analyse(spans, steps=range(1, 3)).window_ns == 15_000_000
    with pytest.raises(InvalidInputError, match="none of the steps range"):
        analyse(spans, steps=range(7, 9))


def test_a_forecast_is_held_against_what_was_measured(two_ranks):
    assert analyse(two_ranks).against(0.5) == pytest.approx(-0.1)
    with pytest.raises(InvalidInputError, match="forecast bubble of 0"):
        analyse(two_ranks).against(0.0)


@given(traces())
def test_the_parts_add_up_to_the_window(spans):
    spans = [
        type(span)(**{name: getattr(span, name) for name in span.__slots__} | {"kind": list(Kind)[number % len(Kind)]})
        for number, span in enumerate(spans)
    ]
    report = analyse(spans)
    for rank in report.ranks:
        assert rank.computing_ns + rank.exposed_ns + rank.other_ns + rank.idle_ns == report.window_ns
        assert min(rank.idle_ns, rank.hidden_ns, rank.caused_wait_ns) >= 0
