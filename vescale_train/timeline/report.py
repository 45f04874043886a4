"""A report of a traced stretch: what each rank did with its time, who was waited for, and what to make faster first.

Pure: from spans on one clock to numbers. A rank's *bubble* is the part of the common window in which it computed
nothing, whether it waited in a collective or for its next order.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import InvalidInputError
from vescale_train.timeline.critical import Segment, critical_path
from vescale_train.timeline.intervals import Interval, subtract, total, union
from vescale_train.timeline.meetings import meetings_of
from vescale_train.timeline.span import Kind, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMPUTING = frozenset({Kind.COMPUTE, Kind.OPTIMIZER})
STRAGGLER_RATIO = 1.2
"""A rank lags when a span takes it so many times what the median of the others takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank did with the window; the parts add up to it."""

    rank: int
    window_ns: int
    computing_ns: int
    exposed_ns: int
    """In communication while nothing was computed."""
    other_ns: int
    """In anything else that was timed: data, checkpoints."""
    idle_ns: int
    """In nothing that was timed."""
    hidden_ns: int
    """In communication behind computation; a part of ``computing_ns``."""
    caused_wait_ns: int
    """How long others had waited when this rank came last to a meeting, by the first of them."""

    @property
    def bubble(self) -> float:
        """The part of the window in which this rank computed nothing, 0 to 1."""
        return 1.0 - self.computing_ns / self.window_ns if self.window_ns else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that takes longer over the same thing than the others do."""

    name: str
    rank: int
    median_ns: int
    others_median_ns: int

    @property
    def ratio(self) -> float:
        """How many times as long."""
        return self.median_ns / max(1, self.others_median_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that a trace tells in numbers."""

    window_ns: int
    ranks: tuple[RankReport, ...]
    stragglers: tuple[Straggler, ...]
    """The worst first."""
    critical: tuple[Segment, ...]
    """From the first to the last moment: what, made shorter, would make the whole shorter."""

    @property
    def bubble(self) -> float:
        """The mean bubble of the ranks."""
        return statistics.fmean(rank.bubble for rank in self.ranks)

    def against(self, forecast_bubble: float) -> float:
        """Return how far the measured bubble is from a forecast one, relative to the forecast.

        Raises:
            InvalidInputError: the forecast is not more than 0.
        """
        if forecast_bubble <= 0:
            raise InvalidInputError(f"cannot hold the trace against a forecast bubble of {forecast_bubble:g}")
        return self.bubble / forecast_bubble - 1.0


def analyse(spans: Sequence[Span], *, steps: range | None = None) -> Report:
    """Return the report of all ranks' spans, of some steps only where asked.

    Raises:
        InvalidInputError: there is no span to report on.
    """
    chosen = [span for span in spans if steps is None or span.step in steps]
    if not chosen:
        raise InvalidInputError(f"no span to report on: {len(spans)} spans, none of the steps {steps}")
    window = (min(span.start_ns for span in chosen), max(span.stop_ns for span in chosen))
    caused = _caused_waits(chosen)
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in chosen:
        by_rank[span.rank].append(span)
    return Report(
        window_ns=window[1] - window[0],
        ranks=tuple(_rank(rank, by_rank[rank], window, caused[rank]) for rank in sorted(by_rank)),
        stragglers=_stragglers(chosen),
        critical=critical_path(chosen),
    )


def _rank(rank: int, spans: Sequence[Span], window: Interval, caused_wait_ns: int) -> RankReport:
    def of(kinds: frozenset[Kind]) -> list[Interval]:
        return union((span.start_ns, span.stop_ns) for span in spans if span.kind in kinds)

    computing, talking = of(_COMPUTING), of(frozenset({Kind.COMMUNICATION}))
    exposed = subtract(talking, computing)
    others = subtract(of(frozenset(Kind) - _COMPUTING - {Kind.COMMUNICATION}), computing + talking)
    parts = [total(part) for part in (computing, exposed, others)]
    return RankReport(
        rank=rank,
        window_ns=window[1] - window[0],
        computing_ns=parts[0],
        exposed_ns=parts[1],
        other_ns=parts[2],
        idle_ns=window[1] - window[0] - sum(parts),
        hidden_ns=total(talking) - parts[1],
        caused_wait_ns=caused_wait_ns,
    )


def _caused_waits(spans: Sequence[Span]) -> dict[int, int]:
    caused: dict[int, int] = defaultdict(int)
    for meeting in meetings_of(spans):
        first = min(span.start_ns for span in meeting.spans)
        caused[meeting.last.rank] += meeting.last.start_ns - first
    return caused


def _stragglers(spans: Sequence[Span]) -> tuple[Straggler, ...]:
    """Return who takes long over what others do too; time in communication is left out, since who waits is not slow."""
    times: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.kind is not Kind.COMMUNICATION:
            times[span.name][span.rank].append(span.duration_ns)
    found = []
    for name, by_rank in times.items():
        medians = {rank: round(statistics.median(durations)) for rank, durations in by_rank.items()}
        for rank, median in medians.items():
            others = [other for peer, other in medians.items() if peer != rank]
            if others and median > STRAGGLER_RATIO * statistics.median(others):
                usual = round(statistics.median(others))
                found.append(Straggler(name=name, rank=rank, median_ns=median, others_median_ns=usual))
    return tuple(sorted(found, key=lambda lag: lag.others_median_ns - lag.median_ns))
