"""Ranges: which byte ranges of one object are read together, decided without any I/O.

A request costs about as much as some hundred kilobytes, so reading a small gap is cheaper than asking twice; but what
is read together is held in memory together, so a span is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """One read: the half-open bytes ``[start, start + length)`` and the ranges that lie in it."""

    start: int
    length: int
    members: tuple[int, ...]
    """Indexes into the sequence that was coalesced, in order of their start."""

    @property
    def stop(self) -> int:
        """First byte past the span."""
        return self.start + self.length


def coalesce(ranges: Sequence[tuple[int, int]], max_gap_bytes: int, max_bytes: int) -> list[Span]:
    """Return the spans to read for these ``(start, length)`` ranges, in order of their start.

    Every range lies whole in exactly one span. Ranges may overlap, repeat, be empty and come in any order. Two
    neighbours share a span if at most ``max_gap_bytes`` lie between them and the span stays within ``max_bytes``; a
    longer range makes a longer span, shared only with ranges that add no byte to it.

    Raises:
        ConfigError: a start, a length or a bound is negative.
    """
    if max_gap_bytes < 0 or max_bytes < 0:
        raise ConfigError(f"cannot coalesce with max_gap_bytes={max_gap_bytes}, max_bytes={max_bytes}: both are >= 0")
    spans: list[Span] = []
    start = stop = 0
    members: list[int] = []
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        first, length = ranges[index]
        if first < 0 or length < 0:
            raise ConfigError(f"cannot read {length} bytes from byte {first} (range {index}): both must be >= 0")
        end = first + length
        joins = end <= stop or (first - stop <= max_gap_bytes and end - start <= max_bytes)
        if members and joins:
            stop = max(stop, end)
        else:
            if members:
                spans.append(Span(start, stop - start, tuple(members)))
            start, stop, members = first, end, []
        members.append(index)
    if members:
        spans.append(Span(start, stop - start, tuple(members)))
    return spans
