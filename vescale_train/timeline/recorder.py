"""The recorder: notes when something began and ended, for little more than two looks at the clock.

A note becomes a ``Span`` only when it is drained, away from the training loop. On a device the two moments are events
on its current stream, which the host never waits for before then.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vescale_train.timeline.span import Kind, Span, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vescale_train.timeline.device import DeviceClock

_log = logging.getLogger(__name__)

CAPACITY = 1_000_000
"""Notes kept between two drains; about 200 bytes each."""


class _Note(NamedTuple):
    name: str
    kind: Kind | None
    start: Any
    """Nanoseconds on the host's clock, or an event of the device."""
    stop: Any
    on_device: bool
    track: str
    step: int
    link: str
    args: Mapping[str, Any]


class Open:
    """A span under way: a context manager that may be used once."""

    __slots__ = ("_args", "_kind", "_link", "_name", "_on_device", "_recorder", "_start", "_track")

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        *,
        kind: Kind | None,
        track: str,
        link: str,
        on_device: bool,
        args: Mapping[str, Any],
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._kind = kind
        self._track = track
        self._link = link
        self._on_device = on_device
        self._args = args
        self._start: Any = None

    def __enter__(self) -> Self:
        self._start = self._recorder.mark(on_device=self._on_device)
        return self

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        stop = recorder.mark(on_device=self._on_device)
        recorder.note(
            _Note(
                self._name,
                self._kind,
                self._start,
                stop,
                self._on_device,
                self._track,
                recorder.step,
                self._link,
                self._args,
            )
        )


class Recorder:
    """Notes of one rank, from any of its threads.

    Args:
        rank: whose spans these are.
        clock: nanoseconds that only grow.
        device: its clock, where spans can be timed on a device; None: the host's clock for all.
        capacity: notes beyond it are dropped, counted and told in the log.
    """

    def __init__(
        self,
        rank: int,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        device: DeviceClock | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self.rank = rank
        self.step = 0
        self.clock = clock
        self.num_dropped = 0
        self._device = device
        self._capacity = capacity
        self._notes: deque[_Note] = deque()

    def span(
        self,
        name: str,
        *,
        kind: Kind | None = None,
        track: str = "cpu",
        link: str = "",
        on_device: bool = False,
        args: Mapping[str, Any] | None = None,
    ) -> Open:
        """Return a context manager that notes the time of its body; ``on_device`` by events where there is a device."""
        on_device = on_device and self._device is not None
        return Open(self, name, kind=kind, track=track, link=link, on_device=on_device, args=args or {})

    def add(self, span: Span) -> None:
        """Note a span whose times, on this rank's clock, are known already."""
        self.note(
            _Note(span.name, span.kind, span.start_ns, span.stop_ns, False, span.track, span.step, span.link, span.args)
        )

    def mark(self, *, on_device: bool) -> Any:
        """Return this moment: nanoseconds, or an event recorded on the device's current stream."""
        return self._device.mark() if on_device and self._device is not None else self.clock()

    def note(self, note: _Note) -> None:
        """Keep a note, or count it as dropped where too many wait."""
        if len(self._notes) >= self._capacity:
            self.num_dropped += 1
        else:
            self._notes.append(note)

    def drain(self) -> list[Span]:
        """Return and forget all spans noted, in the order of their ends; waits for the device where it timed some."""
        if self.num_dropped:
            _log.warning(
                "rank %d dropped %d spans: more than %d between two flushes; flush more often, or time less",
                self.rank,
                self.num_dropped,
                self._capacity,
            )
            self.num_dropped = 0
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        spans = [self._span(note) for note in notes]
        if self._device is not None:
            self._device.rebase()
        return spans

    def _span(self, note: _Note) -> Span:
        start, stop, track = note.start, note.stop, note.track
        if note.on_device and self._device is not None:
            start, stop, track = self._device.time_ns(start), self._device.time_ns(stop), self._device.name
        return Span(
            name=note.name,
            kind=note.kind or kind_of(note.name),
            rank=self.rank,
            start_ns=start,
            stop_ns=max(start, stop),  # two events of a device are rounded one by one
            track=track,
            step=note.step,
            link=note.link,
            args=note.args,
        )
