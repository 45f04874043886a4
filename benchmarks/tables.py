"""Tables of results: the same rows for the terminal and for Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.case import Question
    from benchmarks.results import CaseResult, SideResult


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: titles and cells. All but the first columns of words stand to the right."""

    titles: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        numbers = ["---" if title in {"case", "side", "ratio", "curve", "goal"} else "---:" for title in self.titles]
        lines = [self.titles, tuple(numbers), *self.cells]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def measurements(question: Question, results: Sequence[CaseResult]) -> Rows:
    """Return one row for each case and side."""
    shown = [name for name in question.columns if any(_has(result, name) for result in results)]
    times = ("wall, median (low to high)", "CPU") if question.timed else ()
    cells = []
    for result in results:
        for number, (name, side) in enumerate(result.sides.items()):
            row = [result.case if number == 0 else "", name]
            if question.timed:
                wall, cpu = side.spread("wall_seconds"), side.spread("cpu_seconds")
                row += [text.spread(wall) if wall else "", text.seconds(cpu.median) if cpu else ""]
            cells.append((*row, *(_cell(side, name) for name in shown)))
    return Rows(("case", "side", *times, *map(text.title, shown)), tuple(cells))


def ratios(results: Sequence[CaseResult]) -> Rows:
    """Return one row for each ratio."""
    cells = []
    for result in results:
        for ratio in result.ratios:
            goal = "" if ratio.at_most is None else f"<= {ratio.at_most:g}"
            met = {None: "", True: "met", False: "missed"}[ratio.met]
            cells.append((result.case, ratio.name, f"{ratio.value:.3g}", f"{goal} {met}".strip()))
    return Rows(("case", "ratio", "value", "goal"), tuple(cells))


@dataclass(frozen=True, slots=True)
class Curve:
    """How a side's cost grows along an axis."""

    name: str
    axis: str
    side: str
    points: tuple[tuple[int, float], ...]
    """(value, CPU seconds)."""

    @property
    def exponent(self) -> float | None:
        """Slope of the upper half in logarithms: 1 is linear; None where there are too few points."""
        upper = self.points[len(self.points) // 2 - (len(self.points) % 2 == 0) :] if len(self.points) > 2 else ()
        if len(upper) < 2 or any(cost <= 0 for _, cost in upper):
            return None
        x, y = [math.log(value) for value, _ in upper], [math.log(cost) for _, cost in upper]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        across = sum((a - mean_x) ** 2 for a in x)
        return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / across


def curves(results: Sequence[CaseResult]) -> list[Curve]:
    """Return the curves that the results' sweeps make, of every side."""
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for result in results:
        if result.sweep is None:
            continue
        axis, value = result.sweep
        for name, side in result.sides.items():
            cost = side.spread("cpu_seconds")
            if cost is not None:
                found.setdefault((result.curve, axis, name), []).append((value, cost.median))
    return [Curve(*key, tuple(sorted(points))) for key, points in found.items() if len(points) > 1]


def growth(found: Sequence[Curve]) -> Rows:
    """Return one row for each curve."""
    cells = []
    for curve in found:
        (low, cheap), (high, dear) = curve.points[0], curve.points[-1]
        exponent = curve.exponent
        cells.append(
            (
                curve.name,
                curve.side,
                f"{low:,} to {high:,} {curve.axis}",
                f"{text.seconds(cheap)} to {text.seconds(dear)}",
                "" if exponent is None else f"{exponent:.2f}",
            )
        )
    return Rows(("curve", "side", "from, to", "CPU", "exponent"), tuple(cells))


def _has(result: CaseResult, name: str) -> bool:
    return any(side.spread(name) is not None for side in result.sides.values())


def _cell(side: SideResult, name: str) -> str:
    found = side.spread(name)
    return "" if found is None else text.quantity(name.removeprefix("first."), found.median)
