"""What commands print: tables and progress for people, one JSON object for programs.

Nothing that a store holds reaches the terminal as it is: names and values may contain control characters, which could
move the cursor or hide text.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from vescale_storage.errors import VeScaleError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

PROGRAM: Final = "vescale-ckpt"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_NUM_LISTED: Final = 20
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB", "EB")


class Output:
    """Prints the results of one command."""

    def __init__(self, *, as_json: bool = False, debug: bool = False) -> None:
        self.as_json = as_json
        self._debug = debug

    @classmethod
    def of(cls, args: argparse.Namespace) -> Output:
        """Return the output that the command line asks for."""
        return cls(as_json=args.json, debug=args.debug)

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line for people; nothing with ``--json``."""
        if not self.as_json:
            _console().print(Text(printable(text), style=style), soft_wrap=True)

    def listed(self, title: str, lines: Sequence[str]) -> None:
        """Print how many lines there are and the first of them, for people; nothing of none."""
        if lines:
            self.line(f"{title}: {len(lines)}")
        for line in lines[:_NUM_LISTED]:
            self.line(f"  {line}")
        if len(lines) > _NUM_LISTED:
            self.line(f"  and {len(lines) - _NUM_LISTED} more; --json lists all")

    def warn(self, text: str) -> None:
        """Print a warning on standard error."""
        _console(stderr=True).print(Text(f"{PROGRAM}: warning: {printable(text)}", style="yellow"), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """Print a table for people; plain and unwrapped where standard output is no terminal.

        Args:
            columns: their titles.
            rows: their cells.
            right: titles of the columns that are aligned on the right.
        """
        if self.as_json:
            return
        cells = [[printable(cell) for cell in row] for row in rows]
        console = _console()
        if not console.is_terminal:
            for text in _plain(columns, cells, right):
                console.print(Text(text), soft_wrap=True)
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)

    def emit(self, value: Mapping[str, Any]) -> None:
        """Print the one JSON object of ``--json``; nothing without it."""
        if self.as_json:
            print(json.dumps(plain_json(value), indent=2, allow_nan=False))

    @contextlib.contextmanager
    def progress(self, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show a bar on standard error while the block runs, if that is a terminal; yields what to call with bytes."""
        console = _console(stderr=True)
        if not console.is_terminal:
            yield lambda _: None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(printable(what), total=total_bytes)
            yield lambda num_bytes: progress.advance(task, num_bytes)

    @contextlib.contextmanager
    def counting(self, what: str) -> Iterator[Callable[[str, int], None]]:
        """Show what is being done on standard error while the block runs, if that is a terminal.

        Yields what to call with the name of the things that are done and how many of them are.
        """
        console = _console(stderr=True)
        if not console.is_terminal:
            yield lambda _what, _number: None
            return
        with console.status(Text(printable(what))) as status:
            yield lambda name, number: status.update(Text(printable(f"{what}: {number:,} {name}")))

    def fail(self, error: BaseException) -> None:
        """Print an error: one line on standard error, and with ``--json`` an object on standard output."""
        kind, message, context = _describe(error)
        if self._debug:
            sys.stderr.write("".join(traceback.format_exception(error)))
        _console(stderr=True).print(
            Text(f"{PROGRAM}: error: {printable(one_line(message))}", style="red"), soft_wrap=True
        )
        self.emit({"error": {"kind": kind, "message": message, "context": context}})


def _describe(error: BaseException) -> tuple[str, str, dict[str, Any]]:
    if isinstance(error, VeScaleError):
        return error.kind, error.message, error.context
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted", {}
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, OSError | MemoryError):
        return "storage", message, {}
    return "internal", f"{message}; this is a bug, please report it with what --debug shows", {}


def _console(*, stderr: bool = False) -> Console:
    # Made anew each time: the streams may have been replaced, and so may the terminal's width.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table for programs such as grep and awk."""
    table = [list(columns), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    for row in table:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def printable(text: str) -> str:
    """Return a text whose control characters, also those that reverse the direction, are spelled out."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a message of several lines as one."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def plain_json(value: Any) -> Any:
    """Return a value made of what JSON has; anything else as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value if isinstance(value, int) or math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(item) for item in value]
    return str(value)


def format_bytes(num_bytes: int) -> str:
    """Return bytes as people read them, with three digits: ``90.9 MB``."""
    value, unit = float(num_bytes), "B"
    for larger in _UNITS:
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    if unit == "B":
        return f"{num_bytes} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_time(seconds: float) -> str:
    """Return a time as ``2026-01-31 12:00:00``, in UTC."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso_time(seconds: float) -> str:
    """Return a time for programs: ISO 8601 in UTC."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="seconds")


def format_seconds(seconds: float) -> str:
    """Return a time span as people read it: ``45.0 s``, ``12 min``, ``24 h``, ``7 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or seconds == size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def percent(part: float, whole: float) -> str:
    """Return a part in percent of a whole; of nothing it is 0."""
    return f"{100 * part / whole if whole else 0:.3g} %"


def count(number: int, noun: str) -> str:
    """Return ``1 tensor`` or ``2 tensors``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
