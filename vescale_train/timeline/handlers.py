"""Handlers: what a flush gives its spans to. Any callable that takes a list of spans is one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from vescale_train.timeline.perfetto import lines_of
from vescale_train.timeline.span import Span

if TYPE_CHECKING:
    from pathlib import Path

Handler: TypeAlias = Callable[[Sequence[Span]], None]
"""Called on a thread of its own, one flush after another, with the spans of this rank on the shared clock."""


class TraceFile:
    """Appends to ``folder/rank-00003.json``, which Perfetto and chrome://tracing open as it is, whole or not.

    ``merge_traces(folder.glob("rank-*.json"), out)`` makes one file of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads: dict[int, dict[tuple[int, str], int]] = {}

    def __call__(self, spans: Sequence[Span]) -> None:
        """Append the spans to their rank's file; a file that was there before this object is begun anew."""
        by_rank: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            by_rank[span.rank].append(span)
        self._folder.mkdir(parents=True, exist_ok=True)
        for rank, mine in by_rank.items():
            path = self._folder / f"rank-{rank:05d}.json"
            if rank not in self._threads:
                self._threads[rank] = {}
                path.write_text("[\n", encoding="utf-8")
            with path.open("a", encoding="utf-8") as file:
                file.writelines(lines_of(mine, self._threads[rank]))


class LogLines:
    """Logs one line a flush and name: how often, how long in all, how long at most."""

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self._logger = logger or logging.getLogger(__name__)
        self._level = level

    def __call__(self, spans: Sequence[Span]) -> None:
        """Log the spans, the longest in all first."""
        durations: dict[tuple[int, str], list[int]] = defaultdict(list)
        for span in spans:
            durations[span.rank, span.name].append(span.duration_ns)
        for (rank, name), times in sorted(durations.items(), key=lambda item: -sum(item[1])):
            self._logger.log(
                self._level,
                "rank %d: %s: %d times, %.3f ms in all, %.3f ms at most",
                rank,
                name,
                len(times),
                sum(times) / 1e6,
                max(times) / 1e6,
            )
