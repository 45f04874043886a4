import os
import subprocess
import sys
import threading
import time

import pytest

from vescale_storage.errors import StateError
from vescale_storage.workers import Workers


def test_threads_are_made_as_they_are_needed_and_no_more():
    workers = Workers(3, name="few")
    release = threading.Event()
    assert workers.submit(len, "ab").result(5) == 2
    futures = [workers.submit(release.wait, 10) for _ in range(6)]
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("few-")}
    assert names == {"few-0", "few-1", "few-2"}
    release.set()
    assert all(future.result(5) for future in futures)
    workers.shutdown()


def test_after_shutdown_what_was_submitted_is_served_and_the_threads_end():
    workers = Workers(2, name="ending")
    release = threading.Event()
    futures = [workers.submit(release.wait, 10), *(workers.submit(time.sleep, 0.01) for _ in range(4))]
    workers.shutdown()
    release.set()
    for future in futures:
        future.result(5)
    end = time.monotonic() + 5
    while any(thread.name.startswith("ending-") for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.name.startswith("ending-") for thread in threading.enumerate())


def test_errors_arrive_and_stop_iteration_is_wrapped():
    workers = Workers(1, name="failing")

    def fail(error):
        raise error

    with pytest.raises(ZeroDivisionError):
        workers.submit(fail, ZeroDivisionError()).result(5)
    with pytest.raises(RuntimeError, match="StopIteration"):
        workers.submit(fail, StopIteration()).result(5)
    workers.shutdown()


def test_without_any_thread_a_call_is_refused(monkeypatch):
    def refuse(self):
        raise RuntimeError

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StateError, match="cannot start a thread"):
        Workers(1, name="none").submit(os.getpid)


def test_a_call_that_hangs_does_not_keep_the_interpreter_from_ending():
    code = (
        "import threading, time\n"
        "from vescale_storage.workers import Workers\n"
        "Workers(1, name='x').submit(threading.Event().wait)\n"
        "time.sleep(0.1)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
