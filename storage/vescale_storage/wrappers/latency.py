"""A back end made slow: what a far object store does to a plan, measured on a fast disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_storage.errors import ConfigError
from vescale_storage.payload import payload_bytes
from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vescale_storage.backend import Backend, ObjectInfo, Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """How slow: every request waits, and its bytes pass at a rate of their own (as on a connection per request)."""

    request_seconds: float = 0.03
    bytes_per_second: float = float("inf")

    def __post_init__(self) -> None:
        if not self.request_seconds >= 0 or not self.bytes_per_second > 0:
            raise ConfigError(f"cannot simulate {self}: request_seconds must be >= 0 and bytes_per_second > 0")

    def seconds(self, num_bytes: int) -> float:
        """Return how long a request of this size takes."""
        return self.request_seconds + num_bytes / self.bytes_per_second


class LatencyBackend(WrapperBackend):
    """Waits before each verb; the inner back end's own time comes on top."""

    def __init__(self, inner: Backend, latency: Latency) -> None:
        super().__init__(inner)
        self.latency = latency

    async def put(self, key: str, payload: Payload) -> None:
        """Wait for the payload's time, and pass on."""
        await self._wait(payload_bytes(payload))
        await self.inner.put(key, payload)

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Wait for the payload's time, and pass on."""
        await self._wait(payload_bytes(payload))
        await self.inner.put_if_absent(key, payload)

    async def get(self, key: str) -> bytes:
        """Pass on, and wait for the content's time."""
        content = await self.inner.get(key)
        await self._wait(len(content))
        return content

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Wait for the range's time, and pass on."""
        await self._wait(len(out))
        await self.inner.get_into(key, offset, out)

    async def head(self, key: str) -> ObjectInfo:
        """Wait, and pass on."""
        await self._wait()
        return await self.inner.head(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Wait, and pass on."""
        await self._wait()
        async for info in self.inner.list(prefix):
            yield info

    async def delete(self, key: str) -> None:
        """Wait, and pass on."""
        await self._wait()
        await self.inner.delete(key)

    async def _wait(self, num_bytes: int = 0) -> None:
        await asyncio.sleep(self.latency.seconds(num_bytes))
