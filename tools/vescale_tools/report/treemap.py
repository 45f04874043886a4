"""A squarified treemap: rectangles whose areas are the weights, as square as they can be. Pure.

After Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000): a row of rectangles along the shorter side is filled as
long as that makes its worst rectangle squarer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


def squarify(weights: Sequence[float], within: Area) -> list[Area]:
    """Return one rectangle for each weight, in their order; they fill ``within``.

    Args:
        weights: positive, and the largest first, for good shapes.
        within: what is filled.
    """
    total = sum(weights)
    if not weights or total <= 0:
        return []
    scale = within.width * within.height / total
    sizes = [weight * scale for weight in weights]
    placed: list[Area] = []
    rest, start = within, 0
    while start < len(sizes):
        end = _row_end(sizes, start, min(rest.width, rest.height))
        row, rest = _lay(sizes[start:end], rest)
        placed += row
        start = end
    return placed


def _row_end(sizes: Sequence[float], start: int, side: float) -> int:
    """Return where the row that begins at ``start`` ends: before the size that would make it worse."""
    end, total = start + 1, sizes[start]
    worst = _worst(total, sizes[start], sizes[start], side)
    while end < len(sizes):
        total += sizes[end]
        now = _worst(total, sizes[start], sizes[end], side)
        if now > worst:
            break
        worst, end = now, end + 1
    return end


def _worst(total: float, largest: float, smallest: float, side: float) -> float:
    """Return the longest shape, long side over short one, in a row of these sizes."""
    if min(total, smallest, side) <= 0:
        return float("inf")
    square = side * side / (total * total)
    return max(largest * square, 1 / (smallest * square))


def _lay(row: Sequence[float], rest: Area) -> tuple[list[Area], Area]:
    """Return a row along the shorter side of what is left, and what is left after it."""
    total = sum(row)
    placed = []
    if rest.width >= rest.height:
        width, y = total / rest.height if rest.height else 0.0, rest.y
        for size in row:
            height = size / width if width else 0.0
            placed.append(Area(rest.x, y, width, height))
            y += height
        return placed, Area(rest.x + width, rest.y, max(rest.width - width, 0.0), rest.height)
    height, x = total / rest.width, rest.x
    for size in row:
        width = size / height if height else 0.0
        placed.append(Area(x, rest.y, width, height))
        x += width
    return placed, Area(rest.x, rest.y + height, rest.width, max(rest.height - height, 0.0))
