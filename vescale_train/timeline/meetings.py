"""Meetings: spans of several ranks that cannot end before the last of them has begun."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vescale_train.timeline.span import Span


@dataclass(frozen=True, slots=True)
class Meeting:
    """The spans, one a rank, of one collective or one message."""

    spans: tuple[Span, ...]

    @property
    def last(self) -> Span:
        """The span that began last: all others waited for it."""
        return max(self.spans, key=lambda span: (span.start_ns, span.rank))


def meetings_of(spans: Iterable[Span]) -> list[Meeting]:
    """Return the meetings of at least two ranks: the n-th span with a link on one rank meets the n-th on the others.

    Steps are told apart, so that a rank whose trace lacks a step does not shift all that follow.
    """
    counts: dict[tuple[int, str, int], int] = defaultdict(int)
    found: dict[tuple[int, str, int], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, span.stop_ns)):
        if span.link:
            key = (span.step, span.link, span.rank)
            found[span.step, span.link, counts[key]].append(span)
            counts[key] += 1
    return [Meeting(tuple(together)) for together in found.values() if len(together) > 1]
