"""A budget: the one bound on bytes in flight that coroutines and threads share.

First come, first served, so that a large item is never starved by small ones; an item larger than the whole budget
passes when nothing else is in flight, so that no item is too big to be saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_storage.errors import ConfigError, InternalError, StateError, StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


@dataclass(eq=False, slots=True)
class _Waiter:
    num_bytes: int
    wake: Callable[[], bool]
    """Tells the waiter that it has its bytes; false if nobody is there any more."""
    granted: bool = False


class Budget:
    """Bytes that may be in flight at once. Safe to use from any thread and any event loop of one process."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"cannot make a budget of {limit_bytes} bytes: it must be positive")
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._in_flight_bytes = 0
        self._peak_bytes = 0

    @property
    def in_flight_bytes(self) -> int:
        """Bytes taken now."""
        return self._in_flight_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever taken at once."""
        return self._peak_bytes

    @contextlib.asynccontextmanager
    async def take(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold ``num_bytes`` of the budget inside the ``async with``."""
        await self.acquire(num_bytes)
        try:
            yield
        finally:
            self.release(num_bytes)

    @contextlib.contextmanager
    def take_blocking(self, num_bytes: int, *, timeout_seconds: float | None = None) -> Iterator[None]:
        """Hold ``num_bytes`` of the budget inside the ``with``; see ``acquire_blocking``."""
        self.acquire_blocking(num_bytes, timeout_seconds=timeout_seconds)
        try:
            yield
        finally:
            self.release(num_bytes)

    async def acquire(self, num_bytes: int) -> None:
        """Wait for ``num_bytes``; whoever calls this calls ``release`` once with the same number, from anywhere."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake() -> bool:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:  # the waiter's loop is closed: nobody will ever use or return these bytes
                return False
            return True

        waiter = self._enqueue(num_bytes, wake)
        if waiter is None:
            return
        try:
            await woken
        except BaseException:
            self._withdraw(waiter)
            raise

    def acquire_blocking(self, num_bytes: int, *, timeout_seconds: float | None = None) -> None:
        """Wait for ``num_bytes`` on a thread that runs no event loop; pairs with one ``release``.

        Raises:
            StateError: called on an event loop's thread while the bytes are not free: those who would free them may
                live on that very loop.
            StorageTimeoutError: ``timeout_seconds`` ran out.
        """
        woken = threading.Event()

        def wake() -> bool:
            woken.set()
            return True

        waiter = self._enqueue(num_bytes, wake)
        if waiter is None:
            return
        if _on_event_loop():
            self._withdraw(waiter)
            raise StateError(f"cannot wait for {num_bytes} bytes of budget on an event loop's thread: await acquire()")
        try:
            granted = woken.wait(timeout_seconds)
        except BaseException:
            self._withdraw(waiter)
            raise
        if not granted:
            self._withdraw(waiter)
            raise StorageTimeoutError(
                f"waited {timeout_seconds} s for {num_bytes} bytes of a budget of {self.limit_bytes}, of which "
                f"{self._in_flight_bytes} are in flight: raise the budget or look for what holds it",
                retryable=True,
            )

    def release(self, num_bytes: int) -> None:
        """Give back what one ``acquire`` took.

        Raises:
            InternalError: more is given back than was taken.
        """
        with self._lock:
            if not 0 <= num_bytes <= self._in_flight_bytes:
                raise InternalError(f"released {num_bytes} bytes of budget, but {self._in_flight_bytes} are in flight")
            self._in_flight_bytes -= num_bytes
            self._grant()

    def _enqueue(self, num_bytes: int, wake: Callable[[], bool]) -> _Waiter | None:
        """Return None if the bytes are taken at once, else the waiter at the end of the queue."""
        if num_bytes < 0:
            raise ConfigError(f"cannot take {num_bytes} bytes of budget: a size is not negative")
        with self._lock:
            if not self._waiters and self._fits(num_bytes):
                self._take(num_bytes)
                return None
            waiter = _Waiter(num_bytes, wake)
            self._waiters.append(waiter)
            return waiter

    def _withdraw(self, waiter: _Waiter) -> None:
        # The grant and the cancellation may cross: bytes granted to a waiter that is leaving go to the next one, and a
        # large waiter that leaves the head of the queue may have held up small ones that fit.
        with self._lock:
            if waiter.granted:
                self._in_flight_bytes -= waiter.num_bytes
            elif waiter in self._waiters:  # not so if its loop was found closed
                self._waiters.remove(waiter)
            self._grant()

    def _grant(self) -> None:
        while self._waiters and self._fits(self._waiters[0].num_bytes):
            waiter = self._waiters.popleft()
            if waiter.wake():
                waiter.granted = True
                self._take(waiter.num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return self._in_flight_bytes == 0 or self._in_flight_bytes + num_bytes <= self.limit_bytes

    def _take(self, num_bytes: int) -> None:
        self._in_flight_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._in_flight_bytes)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
