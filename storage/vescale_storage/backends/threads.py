"""Blocking calls on threads that a back end owns, awaited from any event loop, also after a fork.

A back end that shared the loop's default executor would queue behind name look-ups and other people's work, and an
executor made before a fork has no threads in the child.

A call cannot be stopped: on a mount whose server is gone it may hang for ever. So there are two ways to wait for one.
What only looks is ``run_abandonable``: a caller that is cancelled, by a deadline for one, goes on at once. What reads
or fills the caller's buffers is ``run``: a cancelled caller waits for its end, because it is about to use the buffers
again. If the end does not come within a grace period the caller gets ``StuckError``, and must give up the buffers
instead. A buffer of our own for every read would need no such rule, and would cost a copy of all that is ever loaded.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from vescale_storage.errors import StorageTimeoutError
from vescale_storage.workers import Workers

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Generator

P = ParamSpec("P")
T = TypeVar("T")

_GRACE_SECONDS: Final = 10.0
"""No healthy disk takes so long for what one call does; the deadline before it was minutes."""


class StuckError(Exception):
    """A call hangs in the operating system, whatever is done; it may end, and take effect, at any later time."""


class Threads:
    """A lazily started pool that starts afresh in a forked child.

    Args:
        num_threads: at most so many.
        name: of the threads.
        grace_seconds: how long a cancelled caller of ``run`` waits for the end of its call.
    """

    def __init__(self, num_threads: int, *, name: str, grace_seconds: float = _GRACE_SECONDS) -> None:
        self.grace_seconds = grace_seconds
        self._num_threads = num_threads
        self._name = name
        # Keyed by process: setdefault is atomic, so there is no lock that a fork could copy while it is held.
        self._pools: dict[int, Workers] = {}

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function(...)``, called on a thread.

        If the caller is cancelled, a call that has not begun never begins; one that has is waited for first, because it
        may be using buffers that the caller is about to use again.

        Raises:
            StuckError: the caller was cancelled, and the call has not ended in time: it still has the buffers.
        """
        job = self._pool().submit(function, *args, **kwargs)
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not job.cancel() and not await _settles(done, self.grace_seconds):
                raise StuckError from None
            raise

    async def run_abandonable(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function(...)``, called on a thread; a cancelled caller leaves it behind.

        Only for what touches no buffer of the caller and changes nothing in the storage.
        """
        return await asyncio.wrap_future(self._pool().submit(function, *args, **kwargs))

    async def drive(self, steps: Generator[None]) -> None:
        """Run a blocking generator to its end, each step as one job; its ``finally`` runs on a thread, too.

        Raises:
            StuckError: as for ``run``. The step that hangs is the last: once it ends, the generator is closed.
        """
        abandoned: list[bool] = []
        try:
            while await self.run(_advance, steps, abandoned):
                pass
        except StuckError:
            abandoned.append(True)
            raise
        except BaseException:
            await self.run(steps.close)
            raise

    def close(self) -> None:
        """End the threads once they are idle; a later ``run`` starts new ones."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.shutdown()

    def _pool(self) -> Workers:
        pid = os.getpid()
        pool = self._pools.get(pid)
        if pool is None:
            # A pool starts no thread before its first job, so the loser of a race costs nothing.
            pool = self._pools.setdefault(pid, Workers(self._num_threads, name=self._name))
        return pool


def stuck(action: str, key: str, *, url: str) -> StorageTimeoutError:
    """Return the error for a call that hangs. It is not retryable: the buffers of the call may not be used again."""
    return StorageTimeoutError(
        f"cannot {action} {key!r} in {url}: the file system has not answered, nor let go of the call; check the disk "
        "or the mount, and its server",
        key=key,
    )


def _advance(steps: Generator[None], abandoned: list[bool]) -> bool:
    """Return whether there is another step."""
    more = next(steps, steps) is None
    if abandoned:
        steps.close()
    return more


async def _settles(done: asyncio.Future[T], seconds: float) -> bool:
    """Return whether a running job ends in time, whatever cancellations come meanwhile; its outcome does not matter."""
    done.add_done_callback(_retrieve)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not done.done() and (left := end - loop.time()) > 0:
        try:
            await asyncio.wait([done], timeout=left)
        except asyncio.CancelledError:
            continue
    return done.done()


def _retrieve(done: asyncio.Future[T] | concurrent.futures.Future[T]) -> None:
    # The caller is gone; looking at the error keeps asyncio from reporting it as forgotten.
    if not done.cancelled():
        done.exception()
