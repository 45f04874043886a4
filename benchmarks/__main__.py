"""The command: python -m benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import baseline, report, tables, text
from benchmarks.case import SCALES
from benchmarks.questions import QUESTIONS
from benchmarks.results import Run
from benchmarks.runner import Places, default_places, run_all

if TYPE_CHECKING:
    from benchmarks.results import CaseResult

RESULTS = Path(__file__).parent / "results"
console = Console(width=None if sys.stdout.isatty() else 170)


def main(arguments: list[str] | None = None) -> int:
    """Run benchmarks, or show, store or publish an earlier run; return 1 if a case failed, 3 if a ratio got worse."""
    args = _parse(arguments)
    if args.list:
        _list(args.scale)
        return 0
    run = _measure(args) if args.saved is None else Run.open(args.saved)
    for question in QUESTIONS:
        _show(question.name, run)
    changes = baseline.compare(run)
    worse = [change for change in changes if change.worse]
    for change in worse:
        console.print(f"worse than the baseline: {change.key}: {change.before:.3g} -> {change.now:.3g}", style="red")
    if changes and not worse:
        console.print(f"none of {len(changes)} ratios is worse than the baseline")
    if args.store_baseline:
        baseline.store(run)
    if args.report:
        report.write(run)
    if any(result.failed for result in run.results):
        return 1
    return 3 if worse else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure vescale-ckpt beside its peers.",
        epilog="exit status: 0 all well, 1 a case failed, 3 a ratio is worse than the stored baseline",
    )
    parser.add_argument("only", nargs="*", metavar="QUESTION[/CASE]", help="what to run, globs allowed; default: all")
    parser.add_argument(
        "--quick", dest="scale", action="store_const", const="quick", default="full", help="small states"
    )
    parser.add_argument("--scale", choices=sorted(SCALES), help="tiny, quick or full")
    parser.add_argument("--state-bytes", type=float, help="bytes of the model with its Adam moments, e.g. 3e9")
    parser.add_argument("--repeats", type=int, help="measured turns of each side")
    parser.add_argument("--disk", type=Path, help="a folder on disk to work in; default: that for temporary files")
    parser.add_argument("--tmpfs", type=Path, help="a folder in memory to work in; default: /dev/shm")
    parser.add_argument("--list", action="store_true", help="list questions and cases")
    parser.add_argument("--from", dest="saved", type=Path, metavar="FILE", help="take a run that was saved")
    parser.add_argument("--store-baseline", action="store_true", help="make this run the baseline of its scale")
    parser.add_argument("--report", action="store_true", help="write the tables and plots of docs/performance.md")
    return parser.parse_args(arguments)


def _measure(args: argparse.Namespace) -> Run:
    scale = SCALES[args.scale]
    if args.state_bytes:
        scale = dataclasses.replace(scale, state_bytes=int(args.state_bytes))
    if args.repeats:
        scale = dataclasses.replace(scale, repeats=args.repeats)
    places = default_places()
    places = Places(args.disk or places.disk, args.tmpfs or places.tmpfs)
    patterns = [pattern if "/" in pattern else f"{pattern}/*" for pattern in args.only]

    def wanted(key: str) -> bool:
        return not patterns or any(fnmatch.fnmatch(key, pattern) for pattern in patterns)

    run = run_all(QUESTIONS, scale, places, only=wanted, on_result=_tell)
    stamp = run.environment["when"].replace(":", "").replace("+0000", "Z")
    path = RESULTS / f"{scale.name}-{stamp}-{run.environment['revision'][:8] or 'unknown'}.json"
    run.save(path)
    console.print(f"written to {path}")
    return run


def _tell(result: CaseResult, seconds: float) -> None:
    console.print(f"{text.seconds(seconds):>8}  {result.key}", highlight=False)
    if result.failed:
        console.print(result.failed, style="red", highlight=False, markup=False)


def _list(scale: str) -> None:
    for question in QUESTIONS:
        console.print(f"{question.name}: {question.title}", highlight=False)
        for case in question.cases(SCALES[scale]):
            console.print(f"    {question.name}/{case.name}", highlight=False)


def _show(name: str, run: Run) -> None:
    question = next(question for question in QUESTIONS if question.name == name)
    results = run.of(name)
    if not results:
        return
    console.print()
    _print(tables.measurements(question, results), question.title)
    for rows in (tables.ratios(results), tables.growth(tables.curves(results))):
        if rows.cells:
            _print(rows)
    for result in results:
        for note in result.notes:
            console.print(f"  {result.case}: {note}", highlight=False, markup=False)
        for side, why in result.missing.items():
            console.print(f"  {result.case}: {side} did not take part: {why}", highlight=False, markup=False)


def _print(rows: tables.Rows, title: str = "") -> None:
    words = {"case", "side", "ratio", "curve"}
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for column in rows.titles:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    for cells in rows.cells:
        style = "red" if cells[-1].endswith("missed") else ""
        table.add_row(*cells, style=style)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
