"""A deadline: how long a poll goes on, how it paces itself, and what it does when the storage stumbles."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from vescale_storage.errors import ConfigError, StorageError, StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

MIN_PAUSE_SECONDS: Final = 0.002
MAX_PAUSE_SECONDS: Final = 0.25
_PAUSE_PART: Final = 0.125
"""A pause is at most this part of the time waited so far: polling adds an eighth to any wait, whatever its length."""


class Deadline:
    """The time that one wait may take; made inside a running event loop, when the wait begins."""

    def __init__(self, seconds: float, *, max_pause_seconds: float = MAX_PAUSE_SECONDS) -> None:
        if not seconds >= 0:
            raise ConfigError(f"cannot wait {seconds!r} seconds: a deadline is not negative")
        self.seconds = seconds
        self.last_error: Exception | None = None
        """The last failure of the storage that was waited out; part of the story if the deadline passes."""
        self._begun = asyncio.get_running_loop().time()
        self._max_pause_seconds = max(max_pause_seconds, MIN_PAUSE_SECONDS)

    def elapsed_seconds(self) -> float:
        """Return how long the wait has taken so far."""
        return asyncio.get_running_loop().time() - self._begun

    def remaining_seconds(self) -> float:
        """Return how long it may still take, at least 0."""
        return max(0.0, self.seconds - self.elapsed_seconds())

    async def pause(self) -> bool:
        """Sleep before the next poll and return True; False, at once, if the deadline has passed."""
        remaining = self.remaining_seconds()
        if remaining <= 0:
            return False
        wanted = max(MIN_PAUSE_SECONDS, min(self.elapsed_seconds() * _PAUSE_PART, self._max_pause_seconds))
        await asyncio.sleep(min(wanted, remaining))
        return True

    async def attempt(self, action: Callable[[], Awaitable[T]]) -> T | None:
        """Return what ``action()`` returns, or None if it ran into the deadline or the storage asked to try later.

        Errors that trying again cannot help pass through.
        """
        try:
            async with asyncio.timeout(self.remaining_seconds()):
                return await action()
        except StorageError as error:
            if not (error.retryable or isinstance(error, StorageTimeoutError)):
                raise
            self.last_error = error
        except TimeoutError as error:
            self.last_error = error
        return None
