"""Exact counts of what was asked of a back end: requests by verb, bytes each way, retries.

Benchmarks state them, and tests pin them: "a load reads no byte twice" is a number here, not a hope.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from vescale_storage.payload import payload_bytes
from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from vescale_storage.backend import Backend, Leftover, ObjectInfo, Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """A moment's counts; ``later - earlier`` is what happened between them."""

    requests: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Verb -> calls, including failed ones. A listing counts once, whatever its length."""
    up_bytes: int = 0
    """Payload of puts that succeeded."""
    down_bytes: int = 0
    """Bytes that gets returned."""
    retries: int = 0

    @property
    def num_requests(self) -> int:
        """Calls of all verbs together."""
        return sum(self.requests.values())

    def __sub__(self, earlier: Counts) -> Counts:
        verbs = {verb: count - earlier.requests.get(verb, 0) for verb, count in self.requests.items()}
        return Counts(
            requests=MappingProxyType({verb: count for verb, count in verbs.items() if count}),
            up_bytes=self.up_bytes - earlier.up_bytes,
            down_bytes=self.down_bytes - earlier.down_bytes,
            retries=self.retries - earlier.retries,
        )


class Counters:
    """Running totals that several wrappers and threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._up_bytes = 0
        self._down_bytes = 0
        self._retries = 0

    def counts(self) -> Counts:
        """Return the totals of this moment."""
        with self._lock:
            return Counts(
                requests=MappingProxyType(dict(self._requests)),
                up_bytes=self._up_bytes,
                down_bytes=self._down_bytes,
                retries=self._retries,
            )

    def add_request(self, verb: str) -> None:
        """Count one call."""
        with self._lock:
            self._requests[verb] += 1

    def add_bytes(self, *, up: int = 0, down: int = 0) -> None:
        """Count bytes that went up or came down."""
        with self._lock:
            self._up_bytes += up
            self._down_bytes += down

    def add_retry(self) -> None:
        """Count one retry; pass this as ``RetryBackend(..., on_retry=...)``."""
        with self._lock:
            self._retries += 1


class CountingBackend(WrapperBackend):
    """Counts what passes. Inside a RetryBackend it counts attempts, around one it counts what callers asked."""

    def __init__(self, inner: Backend, counters: Counters | None = None) -> None:
        super().__init__(inner)
        self.counters = counters or Counters()

    @property
    def counts(self) -> Counts:
        """The totals of this moment."""
        return self.counters.counts()

    async def put(self, key: str, payload: Payload) -> None:
        """Count, and pass on."""
        self.counters.add_request("put")
        await self.inner.put(key, payload)
        self.counters.add_bytes(up=payload_bytes(payload))

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Count, and pass on."""
        self.counters.add_request("put_if_absent")
        await self.inner.put_if_absent(key, payload)
        self.counters.add_bytes(up=payload_bytes(payload))

    async def get(self, key: str) -> bytes:
        """Count, and pass on."""
        self.counters.add_request("get")
        content = await self.inner.get(key)
        self.counters.add_bytes(down=len(content))
        return content

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Count, and pass on."""
        self.counters.add_request("get_into")
        await self.inner.get_into(key, offset, out)
        self.counters.add_bytes(down=len(out))

    async def head(self, key: str) -> ObjectInfo:
        """Count, and pass on."""
        self.counters.add_request("head")
        return await self.inner.head(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Count, and pass on."""
        self.counters.add_request("list")
        async for info in self.inner.list(prefix):
            yield info

    async def delete(self, key: str) -> None:
        """Count, and pass on."""
        self.counters.add_request("delete")
        await self.inner.delete(key)

    async def leftovers(self) -> Sequence[Leftover]:
        """Count, and pass on."""
        self.counters.add_request("leftovers")
        return await self.inner.leftovers()

    async def remove_leftover(self, leftover: Leftover) -> None:
        """Count, and pass on."""
        self.counters.add_request("remove_leftover")
        await self.inner.remove_leftover(leftover)
