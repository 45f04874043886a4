from __future__ import annotations

import threading
import time

import pytest

from vescale_ckpt.errors import NoSpaceError, StorageTimeoutError
from vescale_ckpt.saving.handle import SaveHandle, SaveReport, SaveState

REPORT = SaveReport(
    run="run",
    step=3,
    version=1,
    bytes_total=1,
    bytes_deduplicated=0,
    bytes_written=1,
    chunks=1,
    packs=1,
    attempts=1,
    imbalance=1.0,
    peak_host_bytes=1,
    seconds={},
)


def test_states_go_forward_only():
    handle = SaveHandle("run", 3)
    assert handle.state is SaveState.STAGING
    handle.advance(SaveState.DURABLE)
    handle.advance(SaveState.STAGED)
    assert handle.state is SaveState.DURABLE
    assert not handle.done
    handle.end(REPORT)
    assert (handle.state, handle.done) == (SaveState.COMMITTED, True)


@pytest.mark.parametrize("wait", ["wait_staged", "result", "outcome", "wait_done"])
def test_waiting_ends_at_the_time_out_and_says_how_far_it_is(wait):
    with pytest.raises(StorageTimeoutError, match=r"the save of run@3 was not \w+ within 0.05 s: it is staging"):
        getattr(SaveHandle("run", 3), wait)(0.05)


def test_waiting_ends_when_it_is_reached():
    handle = SaveHandle("run", 3)
    timer = threading.Timer(0.1, handle.advance, [SaveState.STAGED])
    timer.start()
    began = time.monotonic()
    handle.wait_staged(30)
    assert time.monotonic() - began < 10
    timer.join()
    timer = threading.Timer(0.1, handle.end, [REPORT])
    timer.start()
    assert handle.result(30) is REPORT
    assert handle.outcome() is None
    timer.join()


def test_a_failure_is_raised_whenever_it_is_asked_for():
    handle = SaveHandle("run", 3)
    error = NoSpaceError("disk full")
    handle.end(error)
    assert handle.done
    for _ in range(2):
        with pytest.raises(NoSpaceError, match="disk full"):
            handle.result()
        with pytest.raises(NoSpaceError, match="disk full"):
            handle.wait_staged()
    assert handle.outcome() is error
    handle.wait_done()
    handle.wait_copied()


def test_a_failure_is_forgotten_until_somebody_has_seen_it():
    handle = SaveHandle("run", 3)
    assert not handle.forgotten
    handle.end(NoSpaceError("disk full"))
    assert handle.forgotten
    handle.wait_done()
    assert handle.forgotten
    handle.outcome()
    assert not handle.forgotten


def test_many_threads_may_wait():
    handle, seen = SaveHandle("run", 3), []
    threads = [threading.Thread(target=lambda: seen.append(handle.result(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    handle.end(REPORT)
    for thread in threads:
        thread.join(30)
    assert seen == [REPORT] * 8
