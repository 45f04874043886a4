"""A model of the budget under random takes, gives and cancellations, and a storm of threads and coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_storage import loop
from vescale_storage.budget import Budget

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 15)),
        st.tuples(st.just("give"), st.integers(0, 100)),
        st.tuples(st.just("cancel"), st.integers(0, 100)),
    ),
    max_size=40,
)

SIZES = [1, 10, 400, 999, 1000, 1500]


class Model:
    """The rule in its plainest words."""

    def __init__(self, limit):
        self.limit, self.held, self.queue = limit, {}, deque()

    def serve(self):
        while self.queue:
            name, num_bytes = self.queue[0]
            total = sum(self.held.values())
            if total and total + num_bytes > self.limit:
                return
            self.queue.popleft()
            self.held[name] = num_bytes


@settings(deadline=None, max_examples=200)
@given(ACTIONS)
def test_the_same_waiters_hold_bytes_as_in_the_model(actions):
    async def main():
        budget, model, tasks = Budget(10), Model(10), {}
        for name, (action, number) in enumerate(actions):
            if action == "take":
                tasks[name] = asyncio.create_task(budget.acquire(number))
                model.queue.append((name, number))
            elif action == "give" and model.held:
                chosen = sorted(model.held)[number % len(model.held)]
                budget.release(model.held.pop(chosen))
            elif action == "cancel" and model.queue:
                chosen, size = model.queue[number % len(model.queue)]
                tasks.pop(chosen).cancel()
                model.queue.remove((chosen, size))
            model.serve()
            for _ in range(4):
                await asyncio.sleep(0)
            assert {name for name, task in tasks.items() if task.done()} >= model.held.keys()
            assert not any(tasks[name].done() for name, _ in model.queue)
            assert budget.in_flight_bytes == sum(model.held.values())
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for num_bytes in model.held.values():
            budget.release(num_bytes)
        assert budget.in_flight_bytes == 0

    asyncio.run(main())


class Storm:
    """Takes and gives at random, and writes down each moment at which more is in flight than may be."""

    def __init__(self, limit_bytes, seconds):
        self.budget = Budget(limit_bytes)
        self.stop_at = time.monotonic() + seconds
        self.problems = []
        self.num_items = 0
        self._bytes = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, num_bytes):
        with self._lock:
            self._bytes += num_bytes
            self.num_items += 1
            if self._bytes > self.budget.limit_bytes and self._bytes != num_bytes:
                self.problems.append(f"{self._bytes} bytes with {num_bytes} of them new")
        try:
            yield
        finally:
            with self._lock:
                self._bytes -= num_bytes

    def thread(self, seed):
        rng = random.Random(seed)
        while time.monotonic() < self.stop_at:
            num_bytes = rng.choice(SIZES)
            with self.budget.take_blocking(num_bytes, timeout_seconds=30), self.held(num_bytes):
                time.sleep(rng.choice([0, 0, 0, 0, 0.0005]))

    async def coroutine(self, seed):
        rng = random.Random(seed)
        while time.monotonic() < self.stop_at:
            num_bytes = rng.choice(SIZES)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.choice([0.0005, 0.002, None])), self.budget.take(num_bytes):
                    with self.held(num_bytes):
                        await asyncio.sleep(0)

    async def coroutines(self, num_coroutines):
        await asyncio.gather(*[self.coroutine(seed) for seed in range(num_coroutines)])


def test_a_storm_of_threads_and_coroutines_never_exceeds_the_limit():
    storm = Storm(1000, 1.5)
    future = loop.submit(storm.coroutines(20))
    threads = [threading.Thread(target=storm.thread, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    future.result(60)
    assert storm.problems == []
    assert storm.budget.in_flight_bytes == 0
    assert storm.budget.peak_bytes == 1500
    assert storm.num_items > 500
