"""What the demo shows: a table of the runs, a table of the checks, and the loss curves on top of one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich import box
from rich.markup import escape
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
TABLE_STYLE: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "header_style": "bold",
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
}
PLOT_STYLE = {
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
    table = Table(title="The runs", **TABLE_STYLE)
    table.add_column("run")
    table.add_column("layout")
    for heading in ("from\nstep", "read from\nstorage", "to\nstep", "last\nloss", f"apart from\n{reference.plan.name}"):
        table.add_column(heading, justify="right")
    for run in [reference, *others]:
        worst = max(run.differences(reference).values())
        apart = "" if run is reference else f"{worst:.1e}" if worst else "0"
        read = f"{run.resumed['read'] / 1e6:.1f} MB" if run.resumed is not None else ""
        end = f"{run.last_step}, killed" if run.wreck is not None else f"{run.last_step}"
        loss = f"{run.losses[run.last_step]:.4f}"
        table.add_row(run.plan.name, run.plan.layout, f"{run.first_step}", read, end, loss, apart)
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """Return the table of the checks."""
    table = Table(title="The checks", **TABLE_STYLE)
    table.add_column("")
    table.add_column("must hold")
    table.add_column("found")
    for check in checks:
        mark = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(mark, escape(check.claim), escape(check.found))
    return table


def plot_runs(reference: Run, killed: Run, resumed: Sequence[Run], path: Path) -> None:
    """Draw all loss curves into one picture, and below it how far each is from the undisturbed run."""
    with mpl.rc_context(PLOT_STYLE):
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
        f"SIGKILL in step {end + 1},\nwhile step {killed.lost_step} is being saved",
        (end, killed.losses[end]),
        xytext=(end + 1, 0.52),
        textcoords=("data", "axes fraction"),
        color=ACCENT,
        arrowprops={"arrowstyle": "-", "color": ACCENT, "relpos": (0, 0), "shrinkB": 6},
        zorder=30,
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
        "distance to the undisturbed run; 0 is equal to the bit, 2.4e-7 is the last bit of a float32 between 2 and 4",
        loc="right",
        fontsize=9,
    )
