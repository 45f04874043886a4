from __future__ import annotations

import asyncio

import pytest

from vescale_storage.parallel import map_bounded


def test_results_come_in_order_of_the_items():
    async def work(item):
        await asyncio.sleep(0.001 * (5 - item))
        return item * item

    assert asyncio.run(map_bounded(work, iter(range(5)), 3)) == [0, 1, 4, 9, 16]
    assert asyncio.run(map_bounded(work, [], 3)) == []


def test_no_more_than_the_limit_are_in_flight():
    running, peak = 0, 0

    async def work(_):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.001)
        running -= 1

    asyncio.run(map_bounded(work, range(40), 7))
    assert peak == 7


def test_the_first_error_ends_the_others_before_it_is_raised():
    ended = []

    async def work(item):
        try:
            if item == 1:
                raise ZeroDivisionError
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(item)

    async def main():
        with pytest.raises(ZeroDivisionError):
            await map_bounded(work, range(100), 3)
        return sorted(ended)

    assert asyncio.run(main()) == [0, 1, 2]


def test_cancelling_ends_all():
    ended = []

    async def work(item):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(item)

    async def main():
        task = asyncio.create_task(map_bounded(work, range(100), 2))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sorted(ended)

    assert asyncio.run(main()) == [0, 1]
