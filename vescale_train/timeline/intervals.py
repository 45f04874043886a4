"""Sets of moments as sorted, disjoint, half-open intervals: how long something ran, and how long alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Interval: TypeAlias = tuple[int, int]
"""[start, stop) in nanoseconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the moments in any of the intervals."""
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def subtract(from_these: Iterable[Interval], those: Iterable[Interval]) -> list[Interval]:
    """Return the moments in the first and not in the second."""
    result: list[Interval] = []
    holes = union(those)
    at = 0
    for start, stop in union(from_these):
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        begin, index = start, at
        while index < len(holes) and holes[index][0] < stop:
            if holes[index][0] > begin:
                result.append((begin, holes[index][0]))
            begin = max(begin, holes[index][1])
            index += 1
        if begin < stop:
            result.append((begin, stop))
    return result


def total(intervals: Iterable[Interval]) -> int:
    """Return how long disjoint intervals are together."""
    return sum(stop - start for start, stop in intervals)
