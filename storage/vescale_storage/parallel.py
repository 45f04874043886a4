"""Many awaits at once, but not too many."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

A = TypeVar("A")
B = TypeVar("B")


async def map_bounded(function: Callable[[A], Awaitable[B]], items: Iterable[A], limit: int) -> list[B]:
    """Return ``function(item)`` for every item, in their order, with at most ``limit`` in flight.

    The first error ends the others and is raised once they have ended.
    """
    waiting = list(items)
    results: dict[int, B] = {}
    pending = iter(enumerate(waiting))

    async def work() -> None:
        for index, item in pending:
            results[index] = await function(item)

    tasks = [asyncio.create_task(work()) for _ in range(min(limit, len(waiting)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[index] for index in range(len(waiting))]
