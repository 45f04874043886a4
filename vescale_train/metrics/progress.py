"""Progress for people: a bar that stays in place on a terminal, now and then a line in a log file."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.metrics.meter import Reading

LOG_SECONDS = 10.0
"""Between two lines where the output is no terminal."""


def describe(reading: Reading, num_steps: int | None = None) -> str:
    """Return a reading as one line; what is not known is left out."""
    of = f"/{num_steps}" if num_steps is not None else ""
    parts = [f"step {reading.step}{of}", f"loss {reading.loss:.4f}"]
    if reading.tokens_per_second:
        parts += [f"{_short(reading.tokens_per_second)} tokens/s", f"{1e3 * reading.step_seconds:.0f} ms/step"]
    if reading.mfu is not None:
        parts.append(f"MFU {reading.mfu:.1%}")
    memory = reading.memory
    parts.append(f"{_short(memory.device_peak_bytes or memory.host_peak_bytes)}B")
    if reading.seconds_left is not None:
        parts.append(f"{_clock_time(reading.seconds_left)} left")
    return " · ".join(parts)


class Progress:
    """Shows readings while its ``with`` block runs; use it on rank 0 alone.

    Args:
        num_steps: of the whole run, if it has an end.
        file: where to; a terminal gets a bar, everything else lines.
        clock: seconds.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._console = Console(file=file or sys.stderr)
        self._clock = clock
        self._last: float | None = None
        self._live: Live | None = None
        self._unshown: Reading | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._unshown is not None:
            self._print(self._unshown)

    def show(self, reading: Reading) -> None:
        """Show a reading: at once on a terminal, in a file only after some seconds, and at the end."""
        if self._live is not None:
            self._live.update(self._bar(reading))
            self._unshown = reading
            return
        now = self._clock()
        if self._last is None or now - self._last >= LOG_SECONDS:
            self._last = now
            self._print(reading)
        else:
            self._unshown = reading

    def _print(self, reading: Reading) -> None:
        self._unshown = None
        self._console.print(describe(reading, self._num_steps), highlight=False, soft_wrap=True, markup=False)

    def _bar(self, reading: Reading) -> Table:
        table = Table.grid(padding=(0, 1))
        if self._num_steps:
            table.add_row(ProgressBar(total=self._num_steps, completed=reading.step, width=24), self._text(reading))
        else:
            table.add_row(self._text(reading))
        return table

    def _text(self, reading: Reading) -> str:
        return describe(reading, self._num_steps)


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.0f}P"


def _clock_time(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
