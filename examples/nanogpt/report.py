"""What the demo shows: a table of the runs, a table of the checks, and the loss curves on top of one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from checks import Check
    from matplotlib.axes import Axes
    from runs import Run

REFERENCE = ("#cfd4de", 11.0)
RESUMED = (("#2f7fc1", 7.0), ("#f2a541", 4.2), ("#2e8b57", 1.8))
KILLED = ("#1c1f26", 1.0)
"""Colour and width of each curve. They lie on top of one another, so each is narrower than the one below it."""
ACCENT = "#c8102e"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eceef2",
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a90a0",
    "legend.frameon": False,
}


def runs_table(reference: Run, others: Sequence[Run]) -> Table:
    """Return the table of the runs."""
    table = Table(title="The runs", title_justify="left", title_style="bold", header_style="bold")
    for heading in ("run", "layout", "starts from", "ends", "last loss"):
        table.add_column(heading)
    table.add_column("differs from uninterrupted", justify="right")
    for run in [reference, *others]:
        differs = "" if run is reference else f"at most {max(run.differences(reference).values()):.1e}"
        table.add_row(
            run.plan.name, run.plan.layout, _start(run), _end(run), f"{run.losses[run.last_step]:.4f}", differs
        )
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """Return the table of the checks."""
    table = Table(title="The checks", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("")
    table.add_column("must hold", ratio=3)
    table.add_column("found", ratio=2)
    for check in checks:
        table.add_row("[green]ok[/]" if check.passed else "[bold red]FAILED[/]", check.claim, check.found)
    return table


def _start(run: Run) -> str:
    if run.resumed is None:
        return "random weights"
    return f"step {run.resumed['step']}, {run.resumed['read'] / 1e6:.1f} MB read"


def _end(run: Run) -> str:
    return f"killed in step {run.last_step}" if run.wreck is not None else f"step {run.last_step}"


def plot_runs(reference: Run, killed: Run, resumed: Sequence[Run], path: Path) -> None:
    """Draw all loss curves into one picture, and below it how far each is from the uninterrupted run."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 6.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_losses(above, reference, killed, resumed)
        _draw_distances(below, reference, [*zip(resumed, RESUMED, strict=True), (killed, KILLED)])
        figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, reference: Run, killed: Run, resumed: Sequence[Run]) -> None:
    curves = [(reference, REFERENCE), (killed, KILLED), *zip(resumed, RESUMED, strict=True)]
    for run, (colour, width) in curves:
        label = f"{run.plan.name}: {run.plan.layout}"
        points = list(run.losses), list(run.losses.values())
        axes.plot(*points, color=colour, linewidth=width, label=label, zorder=20 - width)
    end, start = killed.last_step, resumed[0].first_step
    axes.plot(end, killed.losses[end], marker="X", markersize=11, color=ACCENT, linestyle="none", zorder=30)
    axes.annotate(
        f"SIGKILL in step {end + 1},\nin the middle of a save",
        (end, killed.losses[end]),
        xytext=(18, 62),
        textcoords="offset points",
        color=ACCENT,
        arrowprops={"arrowstyle": "-", "color": ACCENT, "shrinkB": 6},
    )
    axes.axvline(start, color="#8a90a0", linewidth=1, linestyle=(0, (4, 3)))
    axes.text(start - 0.5, axes.get_ylim()[0], f"last whole checkpoint: step {start}\n", ha="right", va="bottom")
    axes.set_ylabel("loss (nats a character)")
    axes.set_title("One training, killed while it saved, and resumed on three other layouts", loc="left", weight="bold")
    axes.legend()


def _draw_distances(axes: Axes, reference: Run, curves: Sequence[tuple[Run, tuple[str, float]]]) -> None:
    for run, (colour, width) in curves:
        distances = run.differences(reference)
        size = 3.0 + width  # equal distances lie on top of one another too
        axes.plot(
            list(distances), list(distances.values()), color=colour, linestyle="none", marker="o", markersize=size
        )
    top = max(axes.get_ylim()[1], 1e-7)
    axes.set_ylim(-0.12 * top, 1.15 * top)
    axes.set_ylabel("distance")
    axes.set_xlabel("step")
    axes.set_title(
        "distance to the uninterrupted run; 0 is equal to the bit, 2.4e-7 is the last bit of a float32 between 2 and 4",
        loc="right",
        fontsize=9,
    )
