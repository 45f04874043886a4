"""A device's clock: events on its streams, told in the host's nanoseconds.

A device has no clock that a host can read without waiting; it has events, and the time between two of them. So one
event is recorded while nothing else runs, at a host time that is known, and all others are told by their distance.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Event(Protocol):
    """What is asked of an event; ``torch.cuda.Event(enable_timing=True)`` is one."""

    def record(self) -> None:
        """Mark the current stream's place."""

    def synchronize(self) -> None:
        """Wait until the device has come to that place."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to a later one."""


class DeviceClock:
    """Tells when a device passed its events.

    Args:
        name: the track of its spans, such as 'cuda:0'.
        new_event: makes an event with timing.
        synchronize: waits for all work of the device.
        clock: the host's.
    """

    def __init__(
        self,
        name: str,
        new_event: Callable[[], Event],
        synchronize: Callable[[], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.name = name
        self._new_event = new_event
        self._synchronize = synchronize
        self._clock = clock
        self._base: Event
        self._base_ns: int
        self.rebase()

    def mark(self) -> Event:
        """Record an event on the current stream; the host does not wait."""
        event = self._new_event()
        event.record()
        return event

    def time_ns(self, event: Event) -> int:
        """Return when the device passed an event, on the host's clock; waits until it has."""
        event.synchronize()
        return self._base_ns + round(self._base.elapsed_time(event) * 1e6)

    def rebase(self) -> None:
        """Tie the device to the host's clock anew; events recorded before can no longer be told.

        To be done now and then: the distance between events is a float32 of milliseconds, and after an hour its steps
        are a quarter of a millisecond.
        """
        self._synchronize()
        self._base = self._new_event()
        before = self._clock()
        self._base.record()
        self._base.synchronize()
        self._base_ns = (before + self._clock()) // 2


def device_clock(device: torch.device | None, clock: Callable[[], int] = time.monotonic_ns) -> DeviceClock | None:
    """Return the clock of a CUDA device, or None where spans are timed on the host: no device, or the CPU."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return None

    def new_event() -> Event:
        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event

    return DeviceClock(str(device), new_event, lambda: torch.cuda.synchronize(device), clock)
