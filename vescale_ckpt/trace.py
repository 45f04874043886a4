"""Traces: when each phase of a save or load began and ended on each rank, as files that Perfetto shows.

Every rank writes what it did to a file of its own, for ranks do not meet again when a background save ends; the files
of a folder become one by ``merge_traces``. The format is the JSON of https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_log = logging.getLogger(__name__)

_SUFFIX = ".trace.json"


@dataclass(frozen=True, slots=True)
class Span:
    """One phase on one rank."""

    name: str
    track: str
    """What it ran on: the caller's thread, the background's, ..."""
    began_seconds: float
    """Since the epoch."""
    seconds: float


class Phases:
    """The phases of one save or load on one rank; several threads may end theirs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By name; of a phase that was ended twice, the last."""
        self.spans: list[Span] = []
        self._epoch = time.time() - time.monotonic()

    def end(self, name: str, began: float, track: str = "caller") -> None:
        """Note that a phase ends now which began at a ``time.monotonic()``."""
        self.seconds[name] = seconds = time.monotonic() - began
        self.spans.append(Span(name, track, self._epoch + began, seconds))


def events(spans: Sequence[Span], *, title: str, rank: int) -> list[dict[str, Any]]:
    """Return the events of one rank: a process for the rank, a thread for each track."""
    tracks = list(dict.fromkeys(span.track for span in spans))
    named = [{"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}]
    named += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": t}} for i, t in enumerate(tracks)
    ]
    return [
        *named,
        *(
            {
                "ph": "X",
                "name": span.name,
                "cat": title,
                "pid": rank,
                "tid": tracks.index(span.track),
                "ts": round(span.began_seconds * 1e6),
                "dur": round(span.seconds * 1e6),
                "args": {"of": title},
            }
            for span in spans
        ),
    ]


def write_trace(folder: str | os.PathLike[str], phases: Phases, *, title: str, rank: int) -> None:
    """Write one rank's phases to a new file in a folder; a failure is a warning in the log and nothing else."""
    name = f"{title.replace(' ', '.')}.rank{rank}.{time.time_ns()}{_SUFFIX}"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write(Path(folder) / name, events(list(phases.spans), title=title, rank=rank))
    except OSError as error:
        _log.warning("cannot write the trace of %s on rank %d: %s", title, rank, error)


def merge_traces(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write all traces of a folder to one file for Perfetto, and return how many there were.

    Raises:
        NotFoundError: there are none.
        FormatError: one of them is no trace.
    """
    files = sorted(Path(folder).glob(f"*{_SUFFIX}"))
    if not files:
        raise NotFoundError(f"cannot merge the traces in {os.fspath(folder)}: no file there ends with {_SUFFIX}")
    merged: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            found = json.loads(file.read_text())["traceEvents"]
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"cannot merge {file}: it is no trace - {error!r}; remove it") from error
        merged |= {json.dumps(event, sort_keys=True): event for event in found}  # names of ranks come once
    _write(Path(out), sorted(merged.values(), key=lambda event: (event.get("ts", 0), event["pid"])))
    return len(files)


def _write(path: Path, found: Iterable[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"traceEvents": list(found), "displayTimeUnit": "ms"}))
