"""The document: tables and plots of a run go between the markers of docs/performance.md, whose prose stays.

<!-- benchmarks: save_load -->
...tables...
<!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.environment import ROOT
from benchmarks.questions import BY_NAME, QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Run

DOCUMENT = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
_BLOCK = re.compile(r"(<!-- benchmarks: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(run: Run, document: Path = DOCUMENT, images: Path | None = IMAGES) -> None:
    """Put a run's tables into the document, and its plots beside it.

    Raises:
        ValueError: the document has a block of a name that nothing fills.
    """
    text = document.read_text(encoding="utf-8")
    document.write_text(filled(text, run, plots=images is not None), encoding="utf-8")
    if images is not None:
        draw(run, images)


def filled(text: str, run: Run, *, plots: bool = False) -> str:
    """Return the document's text with every block made anew; blocks of questions that were not asked stay.

    Raises:
        ValueError: there is a block of a name that nothing fills.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.group(1), match.group(2), match.group(3)
        content = _content(name, run, plots=plots)
        return match.group(0) if content is None else f"{begin}\n{content}\n\n{end}"

    return _BLOCK.sub(block, text)


def skeleton() -> str:
    """Return the blocks of all questions, with title and text, for a new document."""
    parts = [f"## {q.title}\n\n{q.text}\n\n<!-- benchmarks: {q.name} -->\n<!-- end -->" for q in QUESTIONS]
    return "\n\n".join(parts) + "\n"


def draw(run: Run, folder: Path) -> list[Path]:
    """Draw the curves of each question, log over log, and return the files."""
    import matplotlib as mpl  # noqa: PLC0415 -- an extra, which only drawing needs

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    files = []
    for question in QUESTIONS:
        found = tables.curves(run.of(question.name))
        if not found:
            continue
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        for curve in found:
            x, y = zip(*curve.points, strict=True)
            axes.plot(x, y, marker="o", markersize=4, label=f"{curve.name}, {curve.side}, over {curve.axis}")
        low, high = axes.get_xlim()
        axes.set(xscale="log", yscale="log", ylabel="CPU seconds", title=question.title)
        cheapest = min(cost for curve in found for _, cost in curve.points)
        first = min(value for curve in found for value, _ in curve.points)
        axes.plot([first, high], [cheapest, cheapest * high / first], ":", color="grey", label="linear")
        axes.set_xlim(left=first / 1.5)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize="x-small")
        path = _image(folder, question.name)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)
        files.append(path)
        del low
    return files


def _image(folder: Path, question: str) -> Path:
    return folder / f"performance-{question.replace('_', '-')}.png"


def _content(name: str, run: Run, *, plots: bool) -> str | None:
    if name == "environment":
        return _environment(run)
    if name == "goals":
        return _goals(run)
    if name not in BY_NAME:
        raise ValueError(f"docs: no question is called {name!r}; there are {sorted(BY_NAME)}, environment and goals")
    question, results = BY_NAME[name], run.of(name)
    if not results:
        return None
    parts = [tables.measurements(question, results).markdown()]
    if any(result.ratios for result in results):
        parts.append(tables.ratios(results).markdown())
    found = tables.curves(results)
    if found:
        parts.append(tables.growth(found).markdown())
        if plots:
            parts.append(f"![{question.title}](images/{_image(Path(), name).name})")
    notes = [f"- {result.case}: {line}" for result in results for line in _remarks(result)]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _remarks(result: tables.CaseResult) -> Sequence[str]:
    missing = [f"{side} did not take part: {why}" for side, why in result.missing.items()]
    failed = [f"failed: {result.failed.splitlines()[0]}"] if result.failed else []
    return [*result.notes, *missing, *failed]


def _environment(run: Run) -> str:
    env, host = run.environment, run.environment["host"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    dirty = ", with changes that are not committed" if env["dirty"] else ""
    missing = f"\n- not installed: {', '.join(env['missing'])}" if env["missing"] else ""
    return (
        f"- revision {env['revision'][:12]}{dirty}, {env['when']}, scale `{run.scale}`\n"
        f"- {host['cpus']} CPUs ({host['cpu'] or host['machine']}), {host['memory_bytes'] / 2**30:.0f} GiB, "
        f"{host['system']}\n"
        f"- Python {env['python']}, {versions}{missing}"
    )


def _goals(run: Run) -> str:
    """Return all ratios that have a goal, of all questions."""
    lines = ["| question | case | ratio | value | goal | |", "| --- | --- | --- | ---: | ---: | --- |"]
    for result in run.results:
        for ratio in result.ratios:
            if ratio.at_most is not None:
                met = "met" if ratio.met else "**missed**"
                lines.append(
                    f"| {result.question} | {result.case} | {ratio.name} | {ratio.value:.3g} | "
                    f"{ratio.at_most:g} | {met} |"
                )
    return "\n".join(lines)
