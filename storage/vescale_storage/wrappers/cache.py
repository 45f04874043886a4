"""A read cache on local disk, shared by all processes of a host: what was read once is not asked for again.

Only objects that never change are kept: packs and manifests. Meant for the way of loads alone: whoever writes, verifies
or collects asks the storage itself. Bytes are verified against their file's own digest when they are used; that they
are the right ones is for the reader to know, who says ``forget`` where they are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vescale_storage import loop
from vescale_storage.backends.checks import check_range
from vescale_storage.keys import MANIFESTS_PREFIX, PACKS_PREFIX
from vescale_storage.wrappers.cache_folder import CacheFolder
from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from vescale_storage.backend import Backend, Payload

_KEPT: Final = (PACKS_PREFIX, MANIFESTS_PREFIX)


class CacheBackend(WrapperBackend):
    """Keeps ranges of packs and manifests, just as they were asked for.

    The folder must be on a local disk: one that hangs holds up the reads that go through it. One that is full,
    read-only or damaged does not; they go to ``inner``, and one warning is logged.

    Args:
        inner: is asked for what is not here.
        folder: may be shared with any number of processes and stores.
        limit_bytes: the folder's, the same for all of them.
    """

    def __init__(self, inner: Backend, folder: str | os.PathLike[str], limit_bytes: int) -> None:
        super().__init__(inner)
        self.files = CacheFolder(folder, limit_bytes)
        self.hit_bytes = 0
        """Bytes that came from the folder."""
        self.missed_bytes = 0
        """Bytes that were asked of ``inner``."""

    async def get(self, key: str) -> bytes:
        """Return the object from the folder, or from ``inner`` to keep it."""
        if not key.startswith(_KEPT):
            return await self.inner.get(key)
        name = self._name(key)
        content = await loop.run_blocking(self.files.read_whole, name)
        if content is None:
            content = await self.inner.get(key)
            self.missed_bytes += len(content)
            await loop.run_blocking(self.files.write, name, 0, memoryview(content), is_end=True)
        else:
            self.hit_bytes += len(content)
        return content

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from the folder, and with at most one request to ``inner``, whose answer is kept."""
        check_range(key, offset, url=self.url)
        if not key.startswith(_KEPT) or not len(out):
            await self.inner.get_into(key, offset, out)
            return
        name = self._name(key)
        missing = await loop.run_blocking(self.files.read, name, offset, out)
        missed_bytes = 0
        if missing is not None:
            start, stop = missing
            missed_bytes = stop - start
            view = out[start - offset : stop - offset]
            await self.inner.get_into(key, start, view)
            await loop.run_blocking(self.files.write, name, start, view)
        self.missed_bytes += missed_bytes
        self.hit_bytes += len(out) - missed_bytes

    async def put(self, key: str, payload: Payload) -> None:
        """Pass on, and forget what was there before."""
        try:
            await self.inner.put(key, payload)
        finally:
            await self._drop(key)

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Pass on, and forget what was there before."""
        try:
            await self.inner.put_if_absent(key, payload)
        finally:
            await self._drop(key)

    async def delete(self, key: str) -> None:
        """Pass on, and forget what was there before."""
        try:
            await self.inner.delete(key)
        finally:
            await self._drop(key)

    def copies(self) -> Sequence[Backend]:
        """Return those of ``inner``."""
        return self.inner.copies()

    async def forget(self, key: str) -> None:
        """Remove all ranges of the object."""
        await self._drop(key)
        await self.inner.forget(key)

    async def _drop(self, key: str) -> None:
        if key.startswith(_KEPT):
            await loop.run_blocking(self.files.forget, self._name(key))

    def _name(self, key: str) -> str:
        return f"{self.url}\n{key}"
