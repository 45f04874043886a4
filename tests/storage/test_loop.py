from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from vescale_storage import loop
from vescale_storage.errors import StateError


async def echo(value, seconds=0.0):
    await asyncio.sleep(seconds)
    return value


async def fail(error):
    raise error


def run_script(source: str, timeout_seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    # Warnings are shown; dev mode would also report every task that a busy machine slows down.
    return subprocess.run(
        [sys.executable, "-W", "always", "-X", "faulthandler", "-c", source],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def test_run_returns_the_result_or_raises_the_very_error():
    assert loop.run(echo(5)) == 5
    error = KeyError("lost")
    with pytest.raises(KeyError) as caught:
        loop.run(fail(error))
    assert caught.value is error


def test_all_threads_share_one_loop_thread():
    async def where():
        await asyncio.sleep(0)
        return threading.current_thread()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        threads = set(pool.map(lambda _: loop.run(where()), range(64)))
    assert [thread.name for thread in threads] == ["vescale-storage-loop"]
    assert all(thread.daemon for thread in threads)


def test_run_on_the_loop_thread_is_refused_and_not_a_deadlock():
    async def nested():
        loop.run(echo(1))

    with pytest.raises(StateError, match="await it"):
        loop.run(nested())

    async def submitted():
        return await asyncio.wrap_future(loop.submit(echo(2)))

    assert loop.run(submitted()) == 2


def test_cancelling_a_submitted_future_cancels_the_coroutine():
    began, ended = threading.Event(), threading.Event()

    async def work():
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = loop.submit(work())
    assert began.wait(5)
    assert future.cancel()
    assert ended.wait(5)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_a_future_that_is_cancelled_before_its_coroutine_begins_is_done_for_whoever_waits():
    release = threading.Event()

    async def block():
        release.wait(10)
        return 1

    first = loop.submit(block())
    second = loop.submit(echo(2))
    assert second.cancel()
    release.set()
    done, waiting = concurrent.futures.wait([first, second], timeout=10)
    assert (done, waiting) == ({first, second}, set())


def test_a_coroutine_that_cancels_itself_cancels_its_future():
    async def work():
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    with pytest.raises(concurrent.futures.CancelledError):
        loop.run(work())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_wants_to_end_the_process_ends_only_itself(error):
    bystander = loop.submit(echo("alive", 0.2))
    with pytest.raises(type(error)):
        loop.run(fail(error))
    assert bystander.result(5) == "alive"
    assert loop.run(echo(1)) == 1


def test_ctrl_c_cancels_the_coroutine_and_waits_for_its_end():
    cleaned = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are deaf to it
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert cleaned == [True]


def test_blocking_work_runs_on_threads_in_parallel():
    barrier = threading.Barrier(16, timeout=10)

    async def many():
        return await asyncio.gather(*[loop.run_blocking(barrier.wait) for _ in range(16)])

    assert sorted(loop.run(many())) == list(range(16))


def test_no_more_threads_than_the_bound_serve_any_number_of_calls():
    running, peak, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    async def many():
        await asyncio.gather(*[loop.run_blocking(work) for _ in range(4 * loop.MAX_WORKERS)])

    loop.run(many())
    assert 1 < peak <= loop.MAX_WORKERS
    names = [thread for thread in threading.enumerate() if thread.name.startswith("vescale-storage-worker")]
    assert len(names) <= loop.MAX_WORKERS


def test_blocking_work_that_has_begun_is_waited_for_when_the_caller_is_cancelled():
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work():
        began.set()
        may_end.wait(10)
        ended.set()
        raise ValueError("nobody is interested in this any more")

    async def caller():
        task = asyncio.create_task(loop.run_blocking(work))
        await asyncio.to_thread(began.wait, 5)
        task.cancel()
        await asyncio.sleep(0.05)
        task.cancel()  # a second time does not help either
        await asyncio.sleep(0.05)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ended.is_set()

    assert loop.run(caller())


def test_abandonable_work_is_left_behind():
    began, may_end = threading.Event(), threading.Event()

    def work():
        began.set()
        may_end.wait(10)

    async def caller():
        task = asyncio.create_task(loop.run_abandonable(work))
        await asyncio.to_thread(began.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1)

    loop.run(caller())
    may_end.set()


def test_blocking_work_that_waits_for_a_thread_is_dropped_when_the_caller_is_cancelled():
    may_end, calls = threading.Event(), []

    async def caller():
        busy = [asyncio.create_task(loop.run_blocking(may_end.wait, 10)) for _ in range(loop.MAX_WORKERS)]
        await asyncio.sleep(0.05)
        queued = asyncio.create_task(loop.run_blocking(calls.append, 1))
        await asyncio.sleep(0.05)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(queued, 1)
        may_end.set()
        await asyncio.gather(*busy)
        return await loop.run_blocking(lambda: "next")

    assert loop.run(caller()) == "next"
    assert calls == []


def test_errors_of_blocking_work_arrive_and_stop_iteration_does_not_hang():
    async def caller(error):
        def work():
            raise error

        await loop.run_blocking(work)

    with pytest.raises(ZeroDivisionError):
        loop.run(caller(ZeroDivisionError()))
    with pytest.raises(RuntimeError, match="StopIteration"):
        loop.run(caller(StopIteration()))


def test_idle_threads_keep_no_argument_alive():
    class Buffer:
        pass

    async def caller(buffer):
        return await loop.run_blocking(id, buffer)

    buffer = Buffer()
    alive = weakref.ref(buffer)
    loop.run(caller(buffer))
    del buffer
    for _ in range(50):
        gc.collect()
        if alive() is None:
            break
        time.sleep(0.02)
    assert alive() is None


FORK = """
import asyncio, gc, os, signal, time, warnings
from vescale_storage import loop
from vescale_storage.errors import StateError
warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of any fork with threads
signal.alarm(100)

async def echo(value, seconds=0.0):
    await asyncio.sleep(seconds)
    return await loop.run_blocking(lambda: value)

assert loop.run(echo(1)) == 1
parents = loop.submit(echo("parent", 1.0))
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    gc.collect()
    assert loop.run(echo(2)) == 2
    for look in (parents.result, parents.exception):
        try:
            look()
        except StateError as error:
            assert "before the fork" in str(error)
        else:
            raise AssertionError("the child took its parent's future for its own")
    grandchild = os.fork()
    if grandchild == 0:
        assert loop.run(echo(3)) == 3
        os._exit(0)
    assert os.waitpid(grandchild, 0)[1] == 0
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert parents.result(10) == "parent"
assert loop.run(echo(4)) == 4
print("fine")
"""


def test_a_forked_child_gets_a_fresh_loop_and_its_parent_keeps_its_own():
    done = run_script(FORK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


FORK_IN_THREADS = """
import asyncio, os, signal, threading, warnings
from vescale_storage import loop
warnings.simplefilter("ignore", DeprecationWarning)
signal.alarm(100)

async def work():
    await loop.run_blocking(sum, range(100))
    return 1

stop = threading.Event()
def hammer():
    while not stop.is_set():
        loop.run(work())

threads = [threading.Thread(target=hammer) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if loop.run(work()) == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
print("fine")
"""


def test_forks_at_any_moment_of_busy_threads_leave_no_lock_behind():
    done = run_script(FORK_IN_THREADS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


EXIT = """
import asyncio, threading, time
from vescale_storage import loop

async def forever():
    try:
        await asyncio.sleep(1000)
    finally:
        print("cleaned", flush=True)

async def stuck():
    await loop.run_abandonable(time.sleep, 1000)

loop.submit(forever())
loop.submit(stuck())
loop.run(asyncio.sleep(0.1))
print("end", flush=True)
"""


def test_the_interpreter_ends_whatever_is_under_way():
    begun = time.monotonic()
    done = run_script(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\ncleaned\n", "")
    assert time.monotonic() - begun < 60


LATE = """
import asyncio, threading
from vescale_storage import loop

async def work():
    await asyncio.sleep(0.3)
    return await loop.run_blocking(lambda: "late")

thread = threading.Thread(target=lambda: print(loop.run(work()), loop.run(work()), flush=True))
thread.start()
"""


def test_a_thread_that_outlives_the_main_thread_can_still_save():
    done = run_script(LATE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late late\n", "")
