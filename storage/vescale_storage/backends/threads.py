"""Blocking calls on threads that a back end owns, awaited from any event loop, also after a fork.

A back end that shared the loop's default executor would queue behind name look-ups and other people's work, and an
executor made before a fork has no threads in the child.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A lazily started pool that starts afresh in a forked child."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        # Keyed by process: setdefault is atomic, so there is no lock that a fork could copy while it is held.
        self._pools: dict[int, ThreadPoolExecutor] = {}

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function(...)``, called on a thread.

        If the caller is cancelled, a call that has not begun never begins; one that has is waited for first, because it
        may be writing to a buffer that the caller is about to use again.
        """
        job = self._pool().submit(function, *args, **kwargs)
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not job.cancel():
                await _settle(done)
            raise

    def close(self) -> None:
        """End the threads once they are idle; a later ``run`` starts new ones."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.shutdown(wait=False)

    def _pool(self) -> ThreadPoolExecutor:
        pid = os.getpid()
        pool = self._pools.get(pid)
        if pool is None:
            # An executor starts no thread before its first job, so the loser of a race costs nothing.
            made = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._name)
            pool = self._pools.setdefault(pid, made)
        return pool


async def _settle(done: asyncio.Future[T]) -> None:
    """Wait for a running job, whatever cancellations come meanwhile; its outcome no longer matters."""
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            continue
    if not done.cancelled():
        done.exception()
