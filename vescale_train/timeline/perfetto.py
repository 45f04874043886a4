"""Spans as Chrome's trace events, which Perfetto and chrome://tracing show: a process a rank, a thread a track.

A rank's file has one event a line and is never closed (the format allows it), so that a flush only appends and a
killed rank leaves all that it had flushed. ``merge_traces`` makes one whole file of the ranks' files, with arrows where
ranks met.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import FormatError
from vescale_train.timeline.meetings import meetings_of
from vescale_train.timeline.span import Kind, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


def event_of(span: Span, thread: int) -> dict[str, Any]:
    """Return a span as a complete event ("ph": "X"); its times are microseconds."""
    args: dict[str, Any] = {
        "start_ns": span.start_ns,
        "stop_ns": span.stop_ns,
        "track": span.track,
        "step": span.step,
        "link": span.link,
        "args": dict(span.args),
    }
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind.value,
        "pid": span.rank,
        "tid": thread,
        "ts": span.start_ns / 1e3,
        "dur": span.duration_ns / 1e3,
        "args": args,
    }


def span_of(event: dict[str, Any]) -> Span:
    """Return the span that an event was made of.

    Raises:
        FormatError: the event was not made by ``event_of``.
    """
    try:
        args = event["args"]
        return Span(
            name=str(event["name"]),
            kind=Kind(event["cat"]),
            rank=int(event["pid"]),
            start_ns=int(args["start_ns"]),
            stop_ns=int(args["stop_ns"]),
            track=str(args["track"]),
            step=int(args["step"]),
            link=str(args["link"]),
            args=dict(args["args"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"not a span's trace event: {error!r} in {str(event)[:200]}") from error


def lines_of(spans: Iterable[Span], threads: dict[tuple[int, str], int]) -> Iterator[str]:
    """Yield the lines to append to a rank's file; ``threads`` numbers the tracks and is carried from call to call."""
    for span in spans:
        key = (span.rank, span.track)
        if key not in threads:
            threads[key] = len(threads)
            for event in _names(span, threads[key]):
                yield json.dumps(event) + ",\n"
        yield json.dumps(event_of(span, threads[key])) + ",\n"


def read_trace(path: Path) -> list[Span]:
    """Return the spans of a file, a rank's own or a merged one; a last line that was cut by a kill is left out.

    Raises:
        FormatError: the file holds something else.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if text.startswith("{"):
            events = json.loads(text)["traceEvents"]
        else:
            # JSON has no line breaks inside of strings: what stands before the last of these is whole.
            whole, _, _ = text.removeprefix("[").rpartition(",\n")
            events = json.loads(f"[{whole}]")
        return [span_of(event) for event in events if event.get("ph") == "X"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"{path} is not a trace of ours: {error}") from error


def merged(spans: Sequence[Span]) -> dict[str, Any]:
    """Return one trace of all ranks: names, spans in order of time, and an arrow from who came last to who waited."""
    threads: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.rank)):
        key = (span.rank, span.track)
        if key not in threads:
            threads[key] = len(threads)
            events += _names(span, threads[key])
        events.append(event_of(span, threads[key]))
    for number, meeting in enumerate(meetings_of(spans)):
        last = meeting.last
        for waiting in meeting.spans:
            if waiting is not last:
                arrow = {"name": last.link, "cat": "meeting", "id": f"{number}.{waiting.rank}"}
                thread, other = threads[last.rank, last.track], threads[waiting.rank, waiting.track]
                events.append(arrow | {"ph": "s", "pid": last.rank, "tid": thread, "ts": last.start_ns / 1e3})
                end = max(waiting.stop_ns, last.start_ns) / 1e3
                events.append(arrow | {"ph": "f", "bp": "e", "pid": waiting.rank, "tid": other, "ts": end})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def merge_traces(paths: Iterable[Path], out: Path) -> list[Span]:
    """Write one trace of the ranks' files, and return its spans."""
    spans = [span for path in sorted(paths) for span in read_trace(path)]
    out.write_text(json.dumps(merged(spans)), encoding="utf-8")
    return spans


def _names(span: Span, thread: int) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "pid": span.rank, "tid": thread}
    yield common | {"name": "process_name", "args": {"name": f"rank {span.rank}"}}
    yield common | {"name": "process_sort_index", "args": {"sort_index": span.rank}}
    yield common | {"name": "thread_name", "args": {"name": span.track}}
