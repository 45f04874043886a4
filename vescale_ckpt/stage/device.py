"""The side stream: copies from a CUDA device that run beside the caller's own work, in the right order after it.

Made on the caller's thread, it remembers how far the caller's stream had come; copies wait for that point and for
nothing later, so a save takes the values of the call and not of work queued after it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_streams: dict[int, Any] = {}
"""One stream a device, kept: streams are few and costly to make."""


class SideStream:
    """Copies from every CUDA device in use, after what the caller had queued when this was made."""

    def __init__(self) -> None:
        self._events: dict[int, Any] = {}
        if not torch.cuda.is_available():
            return
        for device in range(torch.cuda.device_count()):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events[device] = event

    @contextlib.contextmanager
    def copying(self, source: torch.Tensor) -> Iterator[bool]:
        """Run copies from ``source``'s device on the side stream; yield whether they may return early."""
        if source.device.type != "cuda":
            yield False
            return
        device = source.device.index
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(self._events[device])
            yield True

    def wait(self) -> None:
        """Wait until all copies so far have arrived."""
        for device in self._events:
            if device in _streams:
                _streams[device].synchronize()
