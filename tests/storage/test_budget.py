from __future__ import annotations

import asyncio
import threading
import time

import pytest

from vescale_storage import loop
from vescale_storage.budget import Budget
from vescale_storage.errors import ConfigError, InternalError, StateError, StorageTimeoutError


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def started(*coros):
    tasks = []
    for coro in coros:
        tasks.append(asyncio.create_task(coro))
        await settle()
    return tasks


def test_bytes_are_taken_and_given_back():
    async def main():
        budget = Budget(10)
        async with budget.take(4):
            async with budget.take(6):
                assert budget.in_flight_bytes == 10
            assert budget.in_flight_bytes == 4
        with pytest.raises(ZeroDivisionError):
            async with budget.take(10):
                raise ZeroDivisionError
        with budget.take_blocking(3):
            assert budget.in_flight_bytes == 3
        return budget

    budget = loop.run(main())
    assert (budget.in_flight_bytes, budget.peak_bytes, budget.limit_bytes) == (0, 10, 10)


def test_the_first_in_the_queue_is_served_first_even_if_a_later_one_would_fit():
    async def main():
        budget, order = Budget(10), []

        async def worker(name, num_bytes):
            await budget.acquire(num_bytes)
            order.append(name)

        await budget.acquire(6)
        tasks = await started(worker("large", 8), worker("small", 1), worker("smaller", 1))
        assert order == []  # "small" would fit, but "large" came first
        budget.release(6)
        await asyncio.gather(*tasks)
        assert order == ["large", "small", "smaller"]
        assert budget.in_flight_bytes == 10

    loop.run(main())


def test_an_oversize_item_passes_alone():
    async def main():
        budget, order = Budget(10), []

        async def worker(num_bytes):
            async with budget.take(num_bytes):
                order.append(num_bytes)
                assert num_bytes <= 10 or budget.in_flight_bytes == num_bytes
                await asyncio.sleep(0.01)

        await asyncio.wait_for(asyncio.gather(*[worker(n) for n in (3, 25, 4, 100, 1)]), 5)
        assert order == [3, 25, 4, 100, 1]
        assert budget.peak_bytes == 100
        assert budget.in_flight_bytes == 0

    loop.run(main())


def test_zero_bytes_need_no_room_but_wait_their_turn():
    async def main():
        budget = Budget(1)
        async with budget.take(1), budget.take(0):
            assert budget.in_flight_bytes == 1

    loop.run(main())


def test_a_cancelled_waiter_releases_nothing_and_lets_the_next_pass():
    async def main():
        budget = Budget(10)
        await budget.acquire(5)
        large, small = await started(budget.acquire(10), budget.acquire(5))
        assert not small.done()
        large.cancel()
        await settle()
        assert large.cancelled()
        assert small.done()
        assert budget.in_flight_bytes == 10
        budget.release(5)
        budget.release(5)
        assert budget.in_flight_bytes == 0

    loop.run(main())


def test_a_grant_that_crosses_a_cancellation_goes_to_the_next():
    async def main():
        budget = Budget(10)
        await budget.acquire(10)
        first, second = await started(budget.acquire(10), budget.acquire(10))
        budget.release(10)  # granted to the first, which has not run yet ...
        assert budget.in_flight_bytes == 10
        first.cancel()  # ... and never will
        await settle()
        assert first.cancelled()
        assert second.done()
        assert budget.in_flight_bytes == 10
        budget.release(10)

    loop.run(main())


def test_threads_and_coroutines_share_one_limit():
    budget, order = Budget(10), []

    def thread():
        with budget.take_blocking(10, timeout_seconds=10):
            order.append("thread")

    async def main():
        async with budget.take(10):
            worker = threading.Thread(target=thread)
            worker.start()
            while not budget._waiters:  # noqa: ASYNC110 - the thread has nothing to tell it with
                await asyncio.sleep(0.001)
            order.append("coroutine")
        await asyncio.to_thread(worker.join)

    loop.run(main())
    assert order == ["coroutine", "thread"]


def test_a_waiting_coroutine_is_woken_from_a_thread():
    budget = Budget(10)
    budget.acquire_blocking(10)
    future = loop.submit(budget.acquire(1))
    time.sleep(0.05)
    assert not future.done()
    budget.release(10)
    future.result(5)
    budget.release(1)


def test_a_blocking_wait_has_a_deadline_and_leaves_nothing_behind():
    budget = Budget(10)
    budget.acquire_blocking(8)
    with pytest.raises(StorageTimeoutError, match="5 bytes of a budget of 10, of which 8"):
        budget.acquire_blocking(5, timeout_seconds=0.02)
    budget.acquire_blocking(2, timeout_seconds=0)
    budget.release(2)
    budget.release(8)
    assert budget.in_flight_bytes == 0


def test_a_blocking_wait_on_an_event_loop_is_refused():
    async def main():
        budget = Budget(10)
        budget.acquire_blocking(10)  # free: nothing to wait for
        with pytest.raises(StateError, match="await"):
            budget.acquire_blocking(1)
        budget.release(10)
        assert budget.in_flight_bytes == 0

    loop.run(main())


def test_a_waiter_on_a_closed_loop_is_passed_over():
    budget = Budget(10)
    budget.acquire_blocking(10)
    other = asyncio.new_event_loop()
    task = other.create_task(budget.acquire(10))
    other.run_until_complete(asyncio.sleep(0))
    other.close()
    budget.release(10)
    assert budget.in_flight_bytes == 0
    budget.acquire_blocking(10, timeout_seconds=1)
    task.get_coro().close()  # withdraws once more: nothing is given back that was never had
    assert budget.in_flight_bytes == 10
    task._log_destroy_pending = False


def test_nonsense_is_refused():
    for limit in (0, -5):
        with pytest.raises(ConfigError):
            Budget(limit)
    budget = Budget(5)
    with pytest.raises(ConfigError):
        budget.acquire_blocking(-1)
    with pytest.raises(InternalError):
        budget.release(1)
    with pytest.raises(InternalError):
        budget.release(-1)
