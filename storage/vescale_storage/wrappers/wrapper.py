"""A back end that passes every verb on to another: the base of all wrappers, which override only what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_storage.backend import Backend, Leftover, ObjectInfo, Payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class WrapperBackend(Backend):
    """Delegates all to ``inner``; a subclass overrides the verbs that it changes."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities

    async def put(self, key: str, payload: Payload) -> None:
        """Pass on."""
        await self.inner.put(key, payload)

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Pass on."""
        await self.inner.put_if_absent(key, payload)

    async def get(self, key: str) -> bytes:
        """Pass on."""
        return await self.inner.get(key)

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Pass on."""
        await self.inner.get_into(key, offset, out)

    async def head(self, key: str) -> ObjectInfo:
        """Pass on."""
        return await self.inner.head(key)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Pass on."""
        return self.inner.list(prefix)

    async def delete(self, key: str) -> None:
        """Pass on."""
        await self.inner.delete(key)

    async def leftovers(self) -> Sequence[Leftover]:
        """Pass on."""
        return await self.inner.leftovers()

    async def remove_leftover(self, leftover: Leftover) -> None:
        """Pass on."""
        await self.inner.remove_leftover(leftover)

    def copies(self) -> Sequence[Backend]:
        """Return itself around a place, and the places themselves around a cache or a mirror."""
        found = self.inner.copies()
        return (self,) if len(found) == 1 and found[0] is self.inner else found

    async def forget(self, key: str) -> None:
        """Pass on."""
        await self.inner.forget(key)

    async def close(self) -> None:
        """Pass on."""
        await self.inner.close()
