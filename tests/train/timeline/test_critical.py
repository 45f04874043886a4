import itertools

from hypothesis import given
from hypothesis import strategies as st

from vescale_train.timeline.critical import critical_path
from vescale_train.timeline.span import Kind, Span


def told(path):
    return [(s.rank, s.span.name if s.span else "", s.start_ns / 1e6, s.stop_ns / 1e6) for s in path]


def test_the_path_goes_through_whoever_came_last(span):
    spans = [
        span("forward", 0, 0, 2),
        span("reduce", 0, 2, 9, link="g"),
        span("optimizer", 0, 9, 10),
        span("forward", 1, 0, 8),
        span("reduce", 1, 8, 9, link="g"),
        span("optimizer", 1, 9, 9.5),
    ]
    assert told(critical_path(spans)) == [
        (1, "forward", 0, 8),
        (0, "reduce", 8, 9),
        (0, "optimizer", 9, 10),
    ]


def test_a_pipeline_s_path_follows_the_messages(span):
    spans = [
        span("forward", 0, 0, 3),
        span("send", 0, 3, 4, link="0>1"),
        span("recv", 1, 0, 4, link="0>1"),
        span("forward", 1, 4, 7),
        span("backward", 1, 7, 11),
        span("send", 1, 11, 12, link="1>0"),
        span("recv", 0, 4, 12, link="1>0"),
        span("backward", 0, 12, 16),
    ]
    assert [name for _, name, _, _ in told(critical_path(spans))] == [
        "forward", "recv", "forward", "backward", "recv", "backward",
    ]  # fmt: skip


def test_the_innermost_of_nested_spans_stands_and_gaps_are_told(span):
    spans = [span("step", 0, 0, 10), span("forward", 0, 1, 4), span("backward", 0, 4, 8), span("late", 0, 12, 13)]
    assert told(critical_path(spans)) == [
        (0, "step", 0, 1),
        (0, "forward", 1, 4),
        (0, "backward", 4, 8),
        (0, "step", 8, 10),
        (0, "", 10, 12),
        (0, "late", 12, 13),
    ]


def test_nothing_has_no_path():
    assert critical_path([]) == ()


@st.composite
def traces(draw):
    spans = []
    for _ in range(draw(st.integers(1, 12))):
        start, length = draw(st.integers(0, 30)), draw(st.integers(0, 10))
        rank, link = draw(st.integers(0, 2)), draw(st.sampled_from(["", "", "a", "b"]))
        spans.append(
            Span(name="x", kind=Kind.OTHER, rank=rank, start_ns=start, stop_ns=start + length, link=link, step=0)
        )
    return spans


@given(traces())
def test_the_path_leaves_no_gap_from_the_first_to_the_last_moment(spans):
    path = critical_path(spans)
    begin, end = min(span.start_ns for span in spans), max(span.stop_ns for span in spans)
    assert sum(segment.duration_ns for segment in path) == end - begin
    for one, other in itertools.pairwise(path):
        assert one.stop_ns == other.start_ns
    for segment in path:
        assert segment.duration_ns > 0
        assert segment.span is None or segment.span.start_ns <= segment.start_ns
        assert segment.span is None or segment.stop_ns <= segment.span.stop_ns
