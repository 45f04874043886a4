"""Tries again what can be tried again, with growing and jittered pauses, and gives every request a deadline.

The back ends below report each failure once and at once; patience is decided here alone. A create-only put is not
idempotent: when its answer is lost, the retry meets the object that it made itself. So a conflict after a failure of
unknown outcome is read back and compared before it is believed, and so is the last failure.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)
from vescale_storage.payload import cut, payload_bytes
from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from vescale_storage.backend import Backend, Leftover, ObjectInfo, Payload

T = TypeVar("T")

logger = logging.getLogger(__name__)

_UNKNOWN_BYTES: Final = 256 * 2**20
"""What a whole get is taken for when its deadline is set: its size is known only afterwards."""

_COMPARE_BYTES: Final = 8 * 2**20
"""How much of a large object is held at once when it is read back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How patient to be."""

    max_attempts: int = 6
    """Attempts in all; 1 means no retry."""
    first_delay_seconds: float = 0.1
    throttled_delay_seconds: float = 1.0
    """First pause after the server asked to slow down."""
    max_delay_seconds: float = 20.0
    deadline_seconds: float = 60.0
    """Time for one attempt, to which the time of its bytes at ``min_bytes_per_second`` is added."""
    min_bytes_per_second: float = 2**20
    """A connection slower than this is given up."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"cannot retry with max_attempts={self.max_attempts}: at least 1 is needed")
        if self.first_delay_seconds < 0 or self.throttled_delay_seconds < 0 or self.max_delay_seconds < 0:
            raise ConfigError(f"cannot retry with a negative delay: {self}")
        if self.deadline_seconds <= 0 or self.min_bytes_per_second <= 0:
            raise ConfigError(f"cannot retry with a deadline or rate that is not positive: {self}")

    def deadline(self, num_bytes: int) -> float:
        """Return the seconds that one attempt at moving so many bytes may take."""
        return self.deadline_seconds + num_bytes / self.min_bytes_per_second

    def delay(self, num_failed: int, error: StorageError, chance: float) -> float:
        """Return the pause after so many failed attempts.

        It doubles from attempt to attempt; ``chance`` in [0, 1) spreads it over its upper half, so that clients that
        failed together do not come back together.
        """
        first = self.throttled_delay_seconds if isinstance(error, ThrottledError) else self.first_delay_seconds
        # The exponent is bounded only to keep the power finite; the maximum has been reached long before.
        full = min(self.max_delay_seconds, first * 2.0 ** min(num_failed - 1, 60))
        return full * (1 + chance) / 2


class RetryBackend(WrapperBackend):
    """Repeats failed requests as ``policy`` says.

    Args:
        inner: does the work; its retryable errors are those worth another attempt.
        policy: how patient to be.
        on_retry: called before each retry, e.g. ``Counters.add_retry``.
        chance: source of jitter in [0, 1).
    """

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy | None = None,
        *,
        on_retry: Callable[[], None] | None = None,
        chance: Callable[[], float] = random.random,  # noqa: S311 - jitter is no secret
    ) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()
        self._on_retry = on_retry
        self._chance = chance

    async def put(self, key: str, payload: Payload) -> None:
        """Put, again if need be: a whole put twice is a put."""
        await self._repeat("put", key, payload_bytes(payload), lambda: self.inner.put(key, payload))

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Create, again if need be; an object with exactly these bytes after a lost answer counts as created here.

        Raises:
            AlreadyExistsError: the key holds other bytes, or held these before the first attempt.
            StorageError: as for the inner back end, when no attempt is known to have succeeded.
        """
        num_bytes = payload_bytes(payload)
        attempts = _Attempts()
        while True:
            try:
                await self._attempt("put", key, num_bytes, lambda: self.inner.put_if_absent(key, payload))
            except AlreadyExistsError:
                if attempts.num_failed and await self._holds(key, payload):
                    return
                raise
            except StorageError as error:
                attempts.num_failed += 1
                if self._is_last(attempts, error):
                    held = await self._seems_to_hold(attempts, error, key, payload)
                    if held:
                        return
                    raise self._given_up(attempts, error, unknown=held is None) from error
                await self._pause(attempts, "put", key, error)
            else:
                return

    async def get(self, key: str) -> bytes:
        """Get, again if need be."""
        return await self._repeat("get", key, _UNKNOWN_BYTES, lambda: self.inner.get(key))

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Get, again if need be; each attempt fills ``out`` from its start."""
        await self._repeat("get", key, len(out), lambda: self.inner.get_into(key, offset, out))

    async def head(self, key: str) -> ObjectInfo:
        """Ask, again if need be."""
        return await self._repeat("head", key, 0, lambda: self.inner.head(key))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """List; after a failure list again and leave out what was yielded already."""
        attempts = _Attempts()
        last_key = ""
        while True:
            found = self.inner.list(prefix)
            try:
                while (info := await self._attempt("list", prefix, 0, partial(_next, found))) is not None:
                    if info.key > last_key:
                        attempts, last_key = _Attempts(), info.key
                        yield info
            except StorageError as error:
                await self._after_failure(attempts, "list", prefix, error)
            else:
                return

    async def delete(self, key: str) -> None:
        """Delete, again if need be."""
        await self._repeat("delete", key, 0, lambda: self.inner.delete(key))

    async def leftovers(self) -> Sequence[Leftover]:
        """Ask, again if need be."""
        return await self._repeat("list", "", 0, self.inner.leftovers)

    async def remove_leftover(self, leftover: Leftover) -> None:
        """Remove, again if need be."""
        await self._repeat("delete", leftover.key, 0, lambda: self.inner.remove_leftover(leftover))

    async def _repeat(self, verb: str, key: str, num_bytes: int, request: Callable[[], Awaitable[T]]) -> T:
        attempts = _Attempts()
        while True:
            try:
                return await self._attempt(verb, key, num_bytes, request)
            except StorageError as error:
                await self._after_failure(attempts, verb, key, error)

    async def _attempt(self, verb: str, key: str, num_bytes: int, request: Callable[[], Awaitable[T]]) -> T:
        seconds = self.policy.deadline(num_bytes)
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return await request()
        except StorageTimeoutError:
            # A back end that could not even let go of the request knows best whether another may be made.
            raise
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise StorageTimeoutError(
                f"cannot {verb} {key!r} in {self.url}: no answer within {seconds:.3g} s; "
                "check the network, or raise RetryPolicy.deadline_seconds",
                retryable=True,
                key=key,
            ) from error

    async def _after_failure(self, attempts: _Attempts, verb: str, key: str, error: StorageError) -> None:
        attempts.num_failed += 1
        if self._is_last(attempts, error):
            raise self._given_up(attempts, error) from error
        await self._pause(attempts, verb, key, error)

    def _is_last(self, attempts: _Attempts, error: StorageError) -> bool:
        return not error.retryable or attempts.num_failed >= self.policy.max_attempts

    def _given_up(self, attempts: _Attempts, error: StorageError, *, unknown: bool = False) -> StorageError:
        if attempts.num_failed == 1 and not unknown:
            return error
        seconds = time.monotonic() - attempts.began_seconds
        message = f"{error.message} (gave up after {attempts.num_failed} attempts in {seconds:.1f} s)"
        if unknown:
            message += "; it may have been written all the same: look again once the storage answers"
        return type(error)(message, retryable=error.retryable, **error.context)

    async def _pause(self, attempts: _Attempts, verb: str, key: str, error: StorageError) -> None:
        seconds = self.policy.delay(attempts.num_failed, error, self._chance())
        logger.warning(
            "attempt %d of %d to %s %r failed; next in %.2f s: %s",
            attempts.num_failed,
            self.policy.max_attempts,
            verb,
            key,
            seconds,
            error.message,
        )
        if self._on_retry is not None:
            self._on_retry()
        await asyncio.sleep(seconds)

    async def _holds(self, key: str, payload: Payload) -> bool:
        """Return whether the object has exactly the payload's bytes; reads it back in bounded pieces."""
        try:
            if (await self.head(key)).size_bytes != payload_bytes(payload):
                return False
            offset = 0
            found = memoryview(bytearray(_COMPARE_BYTES))
            for batch in cut(payload, _COMPARE_BYTES):
                for view in batch:
                    await self.get_into(key, offset, found[: len(view)])
                    if found[: len(view)] != view:
                        return False
                    offset += len(view)
        except (ObjectNotFoundError, CorruptionError):
            # Deleted, or replaced by something shorter, between two looks.
            return False
        return True

    async def _seems_to_hold(self, attempts: _Attempts, error: StorageError, key: str, payload: Payload) -> bool | None:
        """Return whether a put of unknown outcome has succeeded; None if even that cannot be found out."""
        if not error.retryable and attempts.num_failed == 1:
            return False
        try:
            return await self._holds(key, payload)
        except StorageError:
            return None


class _Attempts:
    """How often one request has failed, and since when it is tried."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.began_seconds = time.monotonic()


async def _next(found: AsyncIterator[ObjectInfo]) -> ObjectInfo | None:
    return await anext(found, None)
