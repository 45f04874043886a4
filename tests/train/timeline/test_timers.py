import threading

import pytest

from vescale_ckpt.errors import StateError, StorageTimeoutError
from vescale_train.timeline import (
    Kind,
    Span,
    add_span,
    close_ndtimers,
    current,
    flush,
    inc_step,
    init_ndtimers,
    ndtimeit,
    ndtimer,
    wait,
)


def test_without_timers_nothing_happens():
    with ndtimeit("forward"):
        pass
    add_span(Span(name="x", kind=Kind.OTHER, rank=0, start_ns=0, stop_ns=1))
    inc_step()
    assert flush() == []
    assert current() is None
    wait()
    close_ndtimers()


def test_handlers_get_what_is_flushed_and_steps_are_counted():
    got = []
    init_ndtimers([got.append])
    with ndtimeit("forward", {"micro_batch": 2}):
        pass
    inc_step()
    with ndtimeit("my own", kind=Kind.COMPUTE, link="a"):
        pass
    flushed = flush(align=True)
    wait()
    assert got == [flushed]
    assert [(span.name, span.step, span.kind) for span in flushed] == [
        ("forward", 0, Kind.COMPUTE),
        ("my own", 1, Kind.COMPUTE),
    ]
    assert flushed[0].args == {"micro_batch": 2}


def test_calls_of_a_function_are_timed():
    init_ndtimers()

    @ndtimer("optimizer")
    def double(value):
        """Return twice as much."""
        return 2 * value

    assert double(4) == 8
    assert double.__doc__ == "Return twice as much."
    assert [span.kind for span in flush()] == [Kind.OPTIMIZER]


def test_a_handler_s_error_is_raised_once_and_the_others_go_on():
    got = []

    def bad(spans):
        raise KeyError("disk")

    init_ndtimers([bad, got.append])
    flush()
    with pytest.raises(KeyError, match="disk"):
        wait()
    wait()
    flush()
    with pytest.raises(KeyError, match="disk"):
        close_ndtimers()
    assert len(got) == 3
    assert current() is None


def test_a_slow_handler_holds_up_nobody_but_who_waits():
    go = threading.Event()
    init_ndtimers([lambda _: go.wait(60)])
    flush()
    flush()
    with pytest.raises(StorageTimeoutError, match=r"2 flushes of rank 0 not handled within 0\.01 s"):
        wait(0.01)
    go.set()
    wait()


def test_timers_are_made_once():
    init_ndtimers()
    with pytest.raises(StateError, match="close_ndtimers"):
        init_ndtimers()
    close_ndtimers()
    init_ndtimers()
