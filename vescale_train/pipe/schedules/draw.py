"""A drawing of a schedule: one lane a rank, one box a computation, as SVG or as a page that shows it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from vescale_train.pipe.schedules.instruction import kind_of
from vescale_train.pipe.schedules.simulate import Costs, Forecast, Span, simulate

if TYPE_CHECKING:
    from vescale_train.pipe.schedules.schedule import Schedule

LANE, BOX, LEFT, TOP = 30, 24, 64, 34
"""Pixels: height of a lane, height of a box, margins."""
HUES = {"F": 212, "B": 28, "I": 28, "W": 140}
"""Blue forwards, orange backwards, green weight gradients; stages of one rank differ in lightness."""


def draw_svg(schedule: Schedule, costs: Costs | None = None, *, width: int = 1200) -> str:
    """Return the schedule drawn to scale as an SVG document, with the forecast bubble in its title line.

    Raises:
        ScheduleError: the schedule cannot come to its end.
    """
    return _svg(schedule, simulate(schedule, costs), width)


def draw_html(schedule: Schedule, costs: Costs | None = None, *, width: int = 1200) -> str:
    """Return a self-contained page: the drawing, a table of each rank's busy time and memory, and the schedule's text.

    Raises:
        ScheduleError: the schedule cannot come to its end.
    """
    forecast = simulate(schedule, costs)
    rows = "".join(
        f"<tr><td>{rank}</td><td>{busy:g}</td><td>{1 - busy / forecast.seconds:.1%}</td><td>{peak:g}</td></tr>"
        for rank, (busy, peak) in enumerate(zip(forecast.busy_seconds, forecast.peak_bytes, strict=True))
    )
    return (
        f"<!doctype html><html><head><meta charset='utf-8'><title>{escape(schedule.name)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em 1em;text-align:right}pre{overflow:auto}</style>"
        f"</head><body><h1>{escape(schedule.name)}</h1>{_svg(schedule, forecast, width)}"
        f"<table><tr><th>rank</th><th>busy</th><th>idle</th><th>peak memory</th></tr>{rows}</table>"
        f"<pre>{escape(schedule.csv())}</pre></body></html>\n"
    )


def _svg(schedule: Schedule, forecast: Forecast, width: int) -> str:
    scale = (width - LEFT - 10) / (forecast.seconds or 1.0)
    height = TOP + LANE * schedule.num_ranks + 10
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches, time {forecast.seconds:g}, bubble {forecast.bubble:.1%}"
    )
    lanes = "".join(
        f"<text x='4' y='{TOP + LANE * rank + 17}'>rank {rank}</text>"
        f"<rect x='{LEFT}' y='{TOP + LANE * rank}' width='{width - LEFT - 10}' height='{BOX}' fill='#f2f2f2'/>"
        for rank in range(schedule.num_ranks)
    )
    boxes = "".join(_box(span, scale, schedule) for span in forecast.spans)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' font-family='sans-serif' "
        f"font-size='11'><text x='4' y='18' font-size='13'>{escape(title)}</text>{lanes}{boxes}</svg>"
    )


def _box(span: Span, scale: float, schedule: Schedule) -> str:
    leaf = span.instruction
    x, y, wide = LEFT + span.start * scale, TOP + LANE * span.rank, (span.end - span.start) * scale
    lightness = 82 - 28 * (leaf.stage // schedule.num_ranks) / max(1, schedule.num_stages // schedule.num_ranks)
    kind = kind_of(leaf.kind)
    told = f"{leaf}: {kind.meaning if kind else leaf.kind}, {span.start:g} to {span.end:g}"
    fill = f"hsl({HUES[leaf.kind]},70%,{lightness:.0f}%)"
    label = (
        f"<text x='{x + wide / 2:.1f}' y='{y + 16}' text-anchor='middle'>{leaf.microbatch}</text>" if wide > 9 else ""
    )
    return (
        f"<g><title>{escape(told)}</title><rect x='{x:.1f}' y='{y}' width='{wide:.1f}' height='{BOX}' "
        f"fill='{fill}' stroke='#555' stroke-width='.5'/>{label}</g>"
    )
