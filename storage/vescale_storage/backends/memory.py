"""Objects in this process's memory, shared by name: the back end of tests and of throw-away stores."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_storage.backend import Backend, Capabilities, ObjectInfo, Payload
from vescale_storage.backends.checks import check_key, check_prefix, check_range, past_end
from vescale_storage.errors import AlreadyExistsError, ObjectNotFoundError
from vescale_storage.payload import payload_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_INLINE_BYTES = 4 * 2**20
"""A larger copy does not hold the event loop in one piece."""


@dataclass(frozen=True, slots=True)
class _Object:
    content: bytes
    modified_seconds: float


# One dictionary operation is atomic, so no lock is needed, and none can be held at the moment of a fork.
_STORES: dict[str, dict[str, _Object]] = {}


class MemoryBackend(Backend):
    """Objects in a dictionary; every ``MemoryBackend`` of one name in a process shows the same objects.

    After a fork, parent and child have copies that know nothing of each other.
    """

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self.capabilities = Capabilities(
            conditional_put=True,
            durable=False,
            shared=False,
            max_object_bytes=2**63 - 1,
            put_concurrency=4,
            get_concurrency=4,
        )
        self._objects = _STORES.setdefault(name, {})

    async def put(self, key: str, payload: Payload) -> None:
        """Store a copy of the payload."""
        check_key(key, url=self.url)
        self._objects[key] = await _copy(payload)

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Store a copy of the payload if the key is free."""
        check_key(key, url=self.url)
        if key not in self._objects:
            made = await _copy(payload)
            if self._objects.setdefault(key, made) is made:
                return
        raise AlreadyExistsError(f"cannot create {key!r} in {self.url}: an object is there", key=key)

    async def get(self, key: str) -> bytes:
        """Return the object, without a copy."""
        return self._find(key).content

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Copy a range into ``out``."""
        check_range(key, offset, url=self.url)
        content = self._find(key).content
        if offset + len(out) > len(content):
            raise past_end(key, offset, len(out), len(content), url=self.url)
        source = memoryview(content)[offset : offset + len(out)]
        # In pieces on the loop, not in a thread: a cancelled call must not write to the caller's buffer afterwards.
        for start in range(0, len(out), _INLINE_BYTES):
            if start:
                await asyncio.sleep(0)
            stop = min(start + _INLINE_BYTES, len(out))
            out[start:stop] = source[start:stop]

    async def head(self, key: str) -> ObjectInfo:
        """Return size and time."""
        return _info(key, self._find(key))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield the objects that were there when the listing began and still are."""
        check_prefix(prefix, url=self.url)
        for key in sorted(key for key in tuple(self._objects) if key.startswith(prefix)):
            found = self._objects.get(key)
            if found is not None:
                yield _info(key, found)

    async def delete(self, key: str) -> None:
        """Forget the object."""
        check_key(key, url=self.url)
        self._objects.pop(key, None)

    def _find(self, key: str) -> _Object:
        check_key(key, url=self.url)
        found = self._objects.get(key)
        if found is None:
            raise ObjectNotFoundError(f"cannot find object {key!r} in {self.url}", key=key)
        return found


async def _copy(payload: Payload) -> _Object:
    if payload_bytes(payload) <= _INLINE_BYTES:
        content = b"".join(payload)
    else:
        content = await asyncio.to_thread(b"".join, payload)
    return _Object(content, time.time())


def _info(key: str, found: _Object) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=len(found.content), modified_seconds=found.modified_seconds)
