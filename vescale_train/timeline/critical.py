"""The critical path: the chain of spans over all ranks that no moment of waiting interrupts.

Walked from the last end backwards. What a rank did before is the cause of what it does now, except where it met
others: then the cause is what kept the last to arrive.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from vescale_train.timeline.meetings import meetings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_train.timeline.span import Span


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the path: part of a span, or a gap before one (``span`` is None: nothing timed ran there)."""

    rank: int
    start_ns: int
    stop_ns: int
    span: Span | None

    @property
    def duration_ns(self) -> int:
        """How much of the path it is."""
        return self.stop_ns - self.start_ns


def critical_path(spans: Sequence[Span]) -> tuple[Segment, ...]:
    """Return the path from the first to the last moment, in order of time; its segments leave no gap.

    Where spans of one rank overlap, the one that began last stands for the moment: the innermost of nested ones.
    """
    if not spans:
        return ()
    pieces = _pieces_by_rank(spans)
    starts = {rank: [piece.start_ns for piece in mine] for rank, mine in pieces.items()}
    last_of = {id(span): meeting.last for meeting in meetings_of(spans) for span in meeting.spans}
    begin = min(span.start_ns for span in spans)
    end = max(spans, key=lambda span: (span.stop_ns, -span.rank))
    rank, now = end.rank, end.stop_ns
    path: list[Segment] = []
    while now > begin:
        piece = _before(pieces[rank], starts[rank], now)
        if piece is None or piece.span is None:
            path.append(Segment(rank, begin, now, None))
            break
        if piece.stop_ns < now:
            path.append(Segment(rank, piece.stop_ns, now, None))
            now = piece.stop_ns
            continue
        last = last_of.get(id(piece.span), piece.span)
        waited = piece.start_ns < last.start_ns < now and last.rank != rank
        start = last.start_ns if waited else piece.start_ns
        path.append(Segment(rank, start, now, piece.span))
        now, rank = start, last.rank if waited else rank
    return tuple(reversed(path))


def _before(pieces: list[Segment], starts: list[int], now: int) -> Segment | None:
    """Return the last piece that begins before a moment."""
    index = bisect.bisect_left(starts, now) - 1
    return pieces[index] if index >= 0 else None


def _pieces_by_rank(spans: Sequence[Span]) -> dict[int, list[Segment]]:
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
    return {rank: _pieces(rank, mine) for rank, mine in by_rank.items()}


def _pieces(rank: int, spans: Sequence[Span]) -> list[Segment]:
    """Return disjoint pieces in order of time: at each moment the span that began last of those running."""
    waiting = sorted(spans, key=lambda span: span.start_ns, reverse=True)
    running: list[tuple[int, int, int, Span]] = []
    pieces: list[Segment] = []
    moments = sorted({moment for span in spans for moment in (span.start_ns, span.stop_ns)})
    for start, stop in pairwise(moments):
        while waiting and waiting[-1].start_ns == start:
            span = waiting.pop()
            heapq.heappush(running, (-span.start_ns, span.stop_ns, id(span), span))
        while running and running[0][1] <= start:
            heapq.heappop(running)
        if running:
            span = running[0][3]
            begun = start
            if pieces and pieces[-1].span is span and pieces[-1].stop_ns == start:
                begun = pieces.pop().start_ns
            pieces.append(Segment(rank, begun, stop, span))
    return pieces
