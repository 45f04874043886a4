from __future__ import annotations

import pytest

from vescale_train.timeline import close_ndtimers
from vescale_train.timeline.span import Span, kind_of


@pytest.fixture
def span():
    """Make a span of milliseconds, of the kind that its name tells."""

    def make(name, rank, start_ms, stop_ms, **more):
        more = {"kind": kind_of(name)} | more
        return Span(name=name, rank=rank, start_ns=round(start_ms * 1e6), stop_ns=round(stop_ms * 1e6), **more)

    return make


@pytest.fixture(autouse=True)
def _no_timers_left():
    yield
    close_ndtimers()


class Events:
    """A device without a device: its time is set by hand."""

    def __init__(self):
        self.device_ms = 1000.0
        self.host_ns = 5_000_000_000
        self.num_waits = 0

    def new(self):
        return _Event(self)

    def synchronize(self):
        self.num_waits += 1


class _Event:
    def __init__(self, device):
        self.device = device
        self.at_ms = None

    def record(self):
        self.at_ms = self.device.device_ms

    def synchronize(self):
        assert self.at_ms is not None

    def elapsed_time(self, end_event):
        return end_event.at_ms - self.at_ms


@pytest.fixture
def events():
    return Events()
