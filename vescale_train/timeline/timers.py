"""Timers for a whole program: ``init_ndtimers`` once, ``ndtimeit`` anywhere, ``flush`` and ``wait`` now and then.

Before ``init_ndtimers``, ``ndtimeit`` does nothing and costs next to nothing, so library code may carry it everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from vescale_ckpt.errors import StateError, StorageTimeoutError
from vescale_train.timeline.clock import ROUNDS, Alignment, measure
from vescale_train.timeline.device import device_clock
from vescale_train.timeline.moved import on_reference
from vescale_train.timeline.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from vescale_train.timeline.handlers import Handler
    from vescale_train.timeline.span import Kind, Span

    F = TypeVar("F", bound=Callable[..., Any])

_NOTHING = contextlib.nullcontext()


class NDTimers:
    """The recorder of this rank, its clock's alignment, and the handlers that get what is flushed.

    Args:
        handlers: called with each flush's spans, on one thread of their own.
        group: ranks whose clocks are aligned; they can exchange CPU tensors. None: this process alone.
        device: where ``on_device`` spans are timed, if it is a CUDA device.
        clock: the host's.
    """

    def __init__(
        self,
        handlers: Sequence[Handler] = (),
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        rank = dist.get_rank(group) if group is not None else 0
        self.recorder = Recorder(rank, clock=clock, device=device_clock(device, clock))
        self.alignment = Alignment()
        self._group = group
        self._clock = clock
        self._handlers = tuple(handlers)
        self._flushed: queue.SimpleQueue[list[Span] | None] = queue.SimpleQueue()
        self._pending = 0
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="ndtimers", daemon=True)
        self._thread.start()

    def align(self, rounds: int = ROUNDS) -> None:
        """Measure how far this rank's clock is from that of rank 0; collective over the group."""
        self.alignment = self.alignment.with_measured(measure(self._group, rounds=rounds, clock=self._clock))

    def flush(self) -> list[Span]:
        """Give all spans noted since the last flush to the handlers, and return them, on the clock of rank 0."""
        spans = [on_reference(span, self.alignment) for span in self.recorder.drain()]
        with self._changed:
            self._pending += 1
        self._flushed.put(spans)
        return spans

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the handlers have had all that was flushed.

        Raises:
            StorageTimeoutError: not within the time.
            Exception: what a handler raised; the first, once.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending == 0, timeout_seconds):
                raise StorageTimeoutError(
                    f"{self._pending} flushes of rank {self.recorder.rank} not handled within {timeout_seconds:g} s"
                )
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Flush, wait, and end the thread."""
        self.flush()
        try:
            self.wait()
        finally:
            self._flushed.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (spans := self._flushed.get()) is not None:
            error: Exception | None = None
            for handler in self._handlers:
                try:
                    handler(spans)
                except Exception as problem:  # noqa: BLE001 -- raised by wait, on the thread of whoever flushed
                    error = error or problem
            with self._changed:
                self._error = self._error or error
                self._pending -= 1
                self._changed.notify_all()


class _Program:
    """The timers of this program, if there are any."""

    timers: NDTimers | None = None


def init_ndtimers(
    handlers: Sequence[Handler] = (),
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    rounds: int = ROUNDS,
) -> NDTimers:
    """Start timing, and return the timers; collective over the ranks of ``torch.distributed`` if it is initialised.

    Args:
        handlers: ``TraceFile``, ``LogLines``, or any callable that takes a list of spans.
        group: ranks that can exchange CPU tensors; None: all, in a gloo group of its own.
        device: where spans with ``on_device`` are timed; None: on the host.
        rounds: questions a rank to align the clocks.

    Raises:
        StateError: the timers are there already; ``close_ndtimers`` ends them.
    """
    if _Program.timers is not None:
        raise StateError("init_ndtimers was called before in this process: call close_ndtimers() first")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.new_group(backend="gloo")
    timers = NDTimers(handlers, group=group, device=device)
    timers.align(rounds)
    _Program.timers = timers
    return timers


def ndtimeit(
    name: str,
    extra: Mapping[str, Any] | None = None,
    *,
    kind: Kind | None = None,
    track: str = "cpu",
    link: str = "",
    on_device: bool = False,
) -> AbstractContextManager[Any]:
    """Return a context manager that times its body, or does nothing where there are no timers.

    Args:
        name: what is done; its first word tells the kind (``KIND_OF_NAME``).
        extra: JSON values to show with the span.
        kind: what the time is spent on, where the name does not tell.
        track: the row in the trace.
        link: the same on all ranks that meet here.
        on_device: time by events on the device's current stream.
    """
    timers = _Program.timers
    if timers is None:
        return _NOTHING
    return timers.recorder.span(name, kind=kind, track=track, link=link, on_device=on_device, args=extra)


def ndtimer(name: str, *, kind: Kind | None = None, on_device: bool = False) -> Callable[[F], F]:
    """Return a decorator that times every call of a function."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with ndtimeit(name, kind=kind, on_device=on_device):
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]

    return decorate


def current() -> NDTimers | None:
    """Return the timers of this program, or None."""
    return _Program.timers


def add_span(span: Span) -> None:
    """Note a span whose times on this rank's clock (``time.monotonic_ns``) are known already, if there are timers."""
    if _Program.timers is not None:
        _Program.timers.recorder.add(span)


def inc_step(by: int = 1) -> None:
    """Count a training step: spans that end from now on belong to the next."""
    if _Program.timers is not None:
        _Program.timers.recorder.step += by


def flush(*, align: bool = False) -> list[Span]:
    """Give this rank's spans to the handlers, and return them; empty where there are no timers.

    Args:
        align: measure the clocks once more before, which follows their drift; then it is collective.
    """
    timers = _Program.timers
    if timers is None:
        return []
    if align:
        timers.align()
    return timers.flush()


def wait(timeout_seconds: float | None = None) -> None:
    """Wait until the handlers have had all that was flushed.

    Raises:
        StorageTimeoutError: not within the time.
        Exception: what a handler raised; the first, once.
    """
    if _Program.timers is not None:
        _Program.timers.wait(timeout_seconds)


def close_ndtimers() -> None:
    """Flush, wait for the handlers, and stop timing; nothing where there are no timers."""
    timers, _Program.timers = _Program.timers, None
    if timers is not None:
        timers.close()
