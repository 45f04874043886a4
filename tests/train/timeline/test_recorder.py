import itertools
import threading

import pytest

from vescale_train.timeline.device import DeviceClock
from vescale_train.timeline.recorder import Recorder
from vescale_train.timeline.span import Kind, Span


@pytest.fixture
def recorder():
    return Recorder(3, clock=itertools.count(100, 10).__next__)


def test_spans_nest_and_come_out_in_the_order_of_their_ends(recorder):
    recorder.step = 7
    with recorder.span("forward", link="a", args={"micro_batch": 1}), recorder.span("block", kind=Kind.COMPUTE):
        pass
    inner, outer = recorder.drain()
    assert (inner.name, inner.start_ns, inner.stop_ns) == ("block", 110, 120)
    assert (outer.name, outer.start_ns, outer.stop_ns) == ("forward", 100, 130)
    assert (outer.kind, outer.rank, outer.step, outer.link) == (Kind.COMPUTE, 3, 7, "a")
    assert outer.args == {"micro_batch": 1}
    assert recorder.drain() == []


def test_a_body_that_raises_is_noted_all_the_same(recorder):
    with pytest.raises(KeyError), recorder.span("data"):
        raise KeyError
    assert [span.name for span in recorder.drain()] == ["data"]


def test_known_spans_are_kept_as_they_are(recorder):
    span = Span(name="save", kind=Kind.CHECKPOINT, rank=3, start_ns=5, stop_ns=9, track="background", step=2)
    recorder.add(span)
    assert recorder.drain() == [span]


def test_what_is_too_much_is_counted_and_told(caplog):
    recorder = Recorder(0, capacity=2)
    for _ in range(5):
        with recorder.span("x"):
            pass
    assert len(recorder.drain()) == 2
    assert "rank 0 dropped 3 spans: more than 2" in caplog.text
    with recorder.span("x"):
        pass
    caplog.clear()
    assert len(recorder.drain()) == 1
    assert not caplog.text


def test_threads_lose_nothing():
    recorder = Recorder(0)
    found = []

    def work():
        for _ in range(500):
            with recorder.span("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found += recorder.drain()
    assert len(found) + len(recorder.drain()) == 2000


def test_spans_on_a_device_are_told_by_its_events(events):
    recorder = Recorder(0, clock=lambda: events.host_ns, device=DeviceClock("cuda:0", events.new, events.synchronize))
    with recorder.span("forward", on_device=True):
        events.device_ms += 2.5
    with recorder.span("data"):
        events.host_ns += 1000
    on_device, on_host = recorder.drain()
    assert (on_device.track, on_device.duration_ns) == ("cuda:0", 2_500_000)
    assert (on_host.track, on_host.duration_ns) == ("cpu", 1000)


def test_without_a_device_the_host_s_clock_is_taken(recorder):
    with recorder.span("forward", on_device=True):
        pass
    (span,) = recorder.drain()
    assert (span.track, span.duration_ns) == ("cpu", 10)
