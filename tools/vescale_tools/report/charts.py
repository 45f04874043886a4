"""Charts of the report: stacked bars over steps, and curves. Pure: numbers in, SVG out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vescale_tools.report.svg import CHAR_WIDTH, color, dot, label, line, path, rect, svg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH: Final = 960.0
HEIGHT: Final = 260.0
_LEFT: Final = 70.0
_RIGHT: Final = 14.0
_TOP: Final = 26.0
_BOTTOM: Final = 34.0
_MOST_DOTS: Final = 60


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers with a name, one for each place on the x axis."""

    name: str
    values: Sequence[float]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``most`` and one; ``high`` is above ``low``."""
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def stacked_bars(places: Sequence[str], series: Sequence[Series], form: Callable[[float], str], name: str) -> str:
    """Return bars, one for each place, of the series on top of one another.

    Args:
        places: what stands below each bar.
        series: from the lowest up; as long as ``places``.
        form: writes a number of the y axis.
        name: what the chart shows.
    """
    totals = [sum(values) for values in zip(*(each.values for each in series), strict=True)]
    frame = _Frame(0.0, max([*totals, 0.0]) or 1.0)
    parts = [*frame.axes(form), *_legend(series)]
    pitch = frame.width / max(len(places), 1)
    width = min(max(pitch * 0.8, pitch - 6), 60)
    for i, place in enumerate(places):
        below = 0.0
        x = _LEFT + i * pitch + (pitch - width) / 2
        for number, each in enumerate(series):
            top, bottom = frame.y(below + each.values[i]), frame.y(below)
            about = f"{place}: {each.name} {form(each.values[i])}"
            parts.append(rect(x, top, width, bottom - top, color(number), about=about))
            below += each.values[i]
    parts += _place_labels(places, lambda i: _LEFT + (i + 0.5) * pitch)
    return svg(WIDTH, HEIGHT, parts, name)


def curves(
    places: Sequence[float], series: Sequence[Series], form: Callable[[float], str], name: str, *, fill: bool = False
) -> str:
    """Return curves over a numeric axis; with ``fill`` what lies between the first and the second is tinted.

    Values that are no numbers leave a gap.
    """
    finite = [value for each in series for value in each.values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    low = 0.0 if fill else low
    frame = _Frame(low, high if high > low else low + (abs(low) or 1.0))
    first, last = (min(places), max(places)) if places else (0.0, 1.0)
    span = last - first or 1.0

    def x(place: float) -> float:
        return _LEFT + (place - first) / span * frame.width

    parts = frame.axes(form)
    if fill and len(series) == 2 and len(places) > 1:
        there = [(x(p), frame.y(v)) for p, v in zip(places, series[0].values, strict=True)]
        back = [(x(p), frame.y(v)) for p, v in zip(places, series[1].values, strict=True)]
        parts.append(path([*there, *reversed(back)], "none", fill="var(--tint)"))
    for number, each in enumerate(series):
        for points in _segments(places, each.values):
            parts.append(path([(x(p), frame.y(v)) for p, v in points], color(number)))
        if len(places) <= _MOST_DOTS:
            parts += [
                dot(x(p), frame.y(v), color(number), f"{p:g}: {each.name} {form(v)}")
                for p, v in zip(places, each.values, strict=True)
                if math.isfinite(v)
            ]
    marks = ticks(first, last, 8) if last > first else [first]
    parts += [label(x(mark), HEIGHT - 14, f"{mark:g}", anchor="middle", style="small") for mark in marks]
    return svg(WIDTH, HEIGHT, [*parts, *_legend(series)], name)


class _Frame:
    """The plot's area, and the scale of its y axis."""

    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high
        self.width = WIDTH - _LEFT - _RIGHT

    def y(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, form: Callable[[float], str]) -> list[str]:
        parts = []
        for tick in ticks(self.low, self.high):
            y = self.y(tick)
            parts += [
                line(_LEFT, y, WIDTH - _RIGHT, y),
                label(_LEFT - 6, y + 4, form(tick), anchor="end", style="small"),
            ]
        return parts


def _segments(places: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Return the runs of points whose values are numbers."""
    runs: list[list[tuple[float, float]]] = [[]]
    for place, value in zip(places, values, strict=True):
        if math.isfinite(value):
            runs[-1].append((place, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) > 1]


def _place_labels(places: Sequence[str], x: Callable[[int], float]) -> list[str]:
    """Return the labels below bars: as many as fit beside one another."""
    if not places:
        return []
    widest = max(len(place) for place in places) * CHAR_WIDTH + 10
    every = max(1, math.ceil(widest * len(places) / (WIDTH - _LEFT - _RIGHT)))
    return [
        label(x(i), HEIGHT - 14, place, anchor="middle", style="small")
        for i, place in enumerate(places)
        if i % every == 0
    ]


def _legend(series: Sequence[Series]) -> list[str]:
    parts, x = [], _LEFT
    for number, each in enumerate(series):
        parts += [rect(x, 6, 10, 10, color(number)), label(x + 15, 15, each.name, style="small")]
        x += 15 + len(each.name) * CHAR_WIDTH + 24
    return parts
