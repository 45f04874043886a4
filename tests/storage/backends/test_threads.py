import asyncio
import os
import threading
import time
import warnings

import pytest

from vescale_storage.backends.threads import StuckError, Threads, stuck


def test_results_and_errors_come_back():
    async def check():
        threads = Threads(2, name="test")
        assert await threads.run(divmod, 7, 3) == (2, 1)
        assert await threads.run(int, "ff", base=16) == 255
        with pytest.raises(ZeroDivisionError):
            await threads.run(divmod, 1, 0)
        threads.close()
        threads.close()
        assert await threads.run(len, "afterwards") == 10
        threads.close()

    asyncio.run(check())


def test_no_more_threads_than_asked_for():
    async def check():
        threads = Threads(3, name="bounded")
        names = await asyncio.gather(*(threads.run(_name_after_a_moment) for _ in range(12)))
        assert len(set(names)) <= 3
        assert all(name.startswith("bounded") for name in names)
        threads.close()

    asyncio.run(check())


def _name_after_a_moment():
    time.sleep(0.002)
    return threading.current_thread().name


def test_a_cancelled_call_that_runs_is_waited_for():
    async def check():
        threads = Threads(1, name="test")
        began, ended = threading.Event(), threading.Event()

        def work():
            began.set()
            time.sleep(0.1)
            ended.set()

        task = asyncio.create_task(threads.run(work))
        await asyncio.to_thread(began.wait)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()  # impatience does not help
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        threads.close()

    asyncio.run(check())


def test_a_call_that_hangs_after_the_grace_period_is_reported():
    async def check():
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        threads = Threads(1, name="test", grace_seconds=0.05)
        release = threading.Event()

        def hang():
            release.wait(10)
            raise ValueError

        task = asyncio.create_task(threads.run(hang))
        await asyncio.sleep(0.01)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(StuckError):
            await task
        assert time.monotonic() - began < 5
        release.set()
        assert await threads.run(len, "x") == 1  # its thread serves again
        assert not problems
        threads.close()

    asyncio.run(check())


def test_an_abandoned_call_is_left_at_once():
    async def check():
        threads = Threads(1, name="test", grace_seconds=30)
        release = threading.Event()
        task = asyncio.create_task(threads.run_abandonable(release.wait, 10))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1)
        release.set()
        assert await threads.run(len, "x") == 1
        threads.close()

    asyncio.run(check())


def test_steps_run_one_after_another_and_end_on_a_thread():
    async def check(failing):
        threads = Threads(1, name="steps")
        seen = []

        def steps():
            try:
                for number in range(3):
                    seen.append((number, threading.current_thread().name))
                    if number == failing:
                        raise ZeroDivisionError
                    yield
            finally:
                seen.append(("end", threading.current_thread().name))

        if failing is None:
            await threads.drive(steps())
        else:
            with pytest.raises(ZeroDivisionError):
                await threads.drive(steps())
        threads.close()
        return seen

    for failing, wanted in ((None, [0, 1, 2, "end"]), (1, [0, 1, "end"])):
        seen = asyncio.run(check(failing))
        assert [what for what, _ in seen] == wanted
        assert {name for _, name in seen} == {"steps-0"}


def test_the_step_that_hangs_is_the_last_and_closes_the_generator():
    async def check():
        threads = Threads(1, name="test", grace_seconds=0.05)
        release, closed = threading.Event(), threading.Event()
        seen = []

        def steps():
            try:
                yield
                release.wait(10)
                yield
                seen.append("went on")
            finally:
                closed.set()

        task = asyncio.create_task(threads.drive(steps()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(StuckError):
            await task
        assert not closed.is_set()
        release.set()
        assert await asyncio.to_thread(closed.wait, 10)
        assert seen == []
        threads.close()

    asyncio.run(check())


def test_the_error_of_a_stuck_call_forbids_another_attempt():
    error = stuck("get", "k", url="/mnt")
    assert not error.retryable
    assert error.context == {"key": "k"}
    assert "cannot get 'k' in /mnt" in error.message


def test_a_cancelled_call_that_waits_never_runs():
    async def check():
        threads = Threads(1, name="test")
        release, ran = threading.Event(), threading.Event()
        busy = asyncio.create_task(threads.run(release.wait))
        queued = asyncio.create_task(threads.run(ran.set))
        await asyncio.sleep(0.01)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        release.set()
        await busy
        await threads.run(len, "")
        assert not ran.is_set()
        threads.close()

    asyncio.run(check())


def test_an_error_after_cancellation_is_not_reported_as_forgotten():
    async def check():
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        threads = Threads(1, name="test")
        began = threading.Event()

        def fail():
            began.set()
            time.sleep(0.05)
            raise ValueError

        task = asyncio.create_task(threads.run(fail))
        await asyncio.to_thread(began.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await asyncio.sleep(0)
        assert not problems
        threads.close()

    asyncio.run(check())


def test_a_forked_child_has_threads_of_its_own():
    threads = Threads(1, name="test")
    assert asyncio.run(threads.run(os.getpid)) == os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            found = asyncio.run(asyncio.wait_for(threads.run(os.getpid), 10))
            code = 0 if found == os.getpid() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert asyncio.run(threads.run(len, "x")) == 1
    threads.close()
