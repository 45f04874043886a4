import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.errors import FormatError
from vescale_train.timeline.handlers import TraceFile
from vescale_train.timeline.perfetto import event_of, merge_traces, merged, read_trace, span_of
from vescale_train.timeline.span import Kind, Span

TEXT = st.text(max_size=12)
SPANS = st.builds(
    lambda start, length, **more: Span(start_ns=start, stop_ns=start + length, **more),
    st.integers(-(10**18), 10**18),
    st.integers(0, 10**15),
    name=TEXT,
    kind=st.sampled_from(Kind),
    rank=st.integers(0, 10**5),
    track=TEXT,
    step=st.integers(0, 10**9),
    link=TEXT,
    args=st.dictionaries(TEXT, st.integers() | TEXT | st.none(), max_size=3),
)


@given(SPANS)
def test_a_span_survives_as_an_event(span):
    assert span_of(json.loads(json.dumps(event_of(span, 0)))) == span


@pytest.mark.parametrize("event", [{}, {"args": 3}, {"name": "x", "cat": "nothing", "pid": 0, "args": {}}, []])
def test_other_events_are_refused(event):
    with pytest.raises(FormatError, match="not a span"):
        span_of(event)


@pytest.fixture
def written(tmp_path, span):
    spans = [
        span("forward", 0, 0, 3),
        span('send "x",\n', 0, 3, 4, link="0>1"),
        span("recv", 1, 1, 4, link="0>1", track="cuda:0"),
    ]
    handler = TraceFile(tmp_path)
    for one in spans:
        handler([one])
    return spans


def test_files_of_ranks_are_appended_to_and_read(tmp_path, written):
    assert read_trace(tmp_path / "rank-00000.json") == written[:2]
    assert read_trace(tmp_path / "rank-00001.json") == written[2:]


def test_a_file_cut_anywhere_gives_what_was_whole(tmp_path, written):
    path = tmp_path / "rank-00000.json"
    content = path.read_bytes()
    counts = []
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        spans = read_trace(path)
        assert spans == written[: len(spans)]
        counts.append(len(spans))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2}


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "rank-00000.json"
    for text in ('{"other": 1}', "[\nnonsense,\n", "{", '[\n{"ph": "X"},\n', "[\n3,\n"):
        path.write_text(text)
        with pytest.raises(FormatError):
            read_trace(path)


def test_all_ranks_become_one_whole_trace_with_arrows_to_who_waited(tmp_path, written):
    out = tmp_path / "trace.json"
    assert merge_traces(tmp_path.glob("rank-*.json"), out) == written
    trace = json.loads(out.read_text())
    events = trace["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in {"process_name", "thread_name"}}
    assert names == {(0, "rank 0"), (0, "cpu"), (1, "rank 1"), (1, "cuda:0")}
    start, finish = [event for event in events if event.get("cat") == "meeting"]
    assert (start["ph"], start["pid"], start["ts"]) == ("s", 0, 3000)
    assert (finish["ph"], finish["pid"], finish["ts"]) == ("f", 1, 4000)
    assert start["id"] == finish["id"]
    assert sorted(read_trace(out), key=lambda span: span.rank) == written


def test_a_new_run_does_not_append_to_the_old_one_s_file(tmp_path, written, span):
    TraceFile(tmp_path)([span("forward", 0, 9, 10)])
    assert [one.start_ns for one in read_trace(tmp_path / "rank-00000.json")] == [9_000_000]


def test_each_track_of_each_rank_is_a_thread(span):
    spans = [span("x", rank, 0, 1, track=track) for rank in (0, 1) for track in ("cpu", "cuda:0")]
    events = [event for event in merged(spans)["traceEvents"] if event["ph"] == "X"]
    assert len({(event["pid"], event["tid"]) for event in events}) == 4
