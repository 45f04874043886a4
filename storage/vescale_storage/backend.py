"""What a back end owes: nine verbs over keys, and a record of what it can do.

A key is a ``/``-separated relative name (see ``keys``). Objects are whole or absent: no verb ever shows a part of an
object that is being put. All verbs are coroutines that run on the package's own event loop (see ``loop``);
an implementation never blocks that loop for long.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes. A memoryview has format ``B`` and one dimension."""

Payload: TypeAlias = Sequence[Buffer]
"""An object's content as buffers that are written one after another, without being joined where that can be avoided.

The caller keeps the buffers unchanged until the put returns; the back end keeps no reference to them after that.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """What a back end says of an object."""

    key: str
    size_bytes: int
    modified_seconds: float
    """Last change, seconds since the epoch, by the back end's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """Bytes that a died put left behind, invisible as objects (temporary file, open multipart upload)."""

    name: str
    """What the back end calls it; opaque to the caller."""
    key: str
    """The key that the put was for, or an empty string where that is unknown."""
    size_bytes: int
    modified_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a back end can do, as data, so that nobody asks for its class."""

    conditional_put: bool
    """``put_if_absent`` is exact under a race."""
    durable: bool
    """What a returned put has written survives the loss of power."""
    shared: bool
    """Other processes see the same objects."""
    max_object_bytes: int
    """A larger put is refused before anything is sent."""
    put_concurrency: int
    """How many puts in flight pay off."""
    get_concurrency: int
    """How many gets in flight pay off."""


class Backend(abc.ABC):
    """Objects under keys. Errors are those of ``errors``: nothing of a client library passes through."""

    url: str
    """Where it is, without secrets, for messages."""
    capabilities: Capabilities

    @abc.abstractmethod
    async def put(self, key: str, payload: Payload) -> None:
        """Write a whole object, replacing what was there, atomically and durably.

        Raises:
            StorageError: and its subclasses AccessDeniedError, NoSpaceError, ThrottledError, StorageTimeoutError.
        """

    @abc.abstractmethod
    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Write a whole object only if the key holds none; of several racing callers exactly one succeeds.

        Raises:
            AlreadyExistsError: the key holds an object; it is unchanged.
            StorageError: as for put.
        """

    @abc.abstractmethod
    async def get(self, key: str) -> bytes:
        """Return a whole object.

        Raises:
            ObjectNotFoundError: the key holds no object.
            StorageError: as for put.
        """

    @abc.abstractmethod
    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the object's bytes from ``offset`` on, exactly ``len(out)`` of them.

        Raises:
            ObjectNotFoundError: the key holds no object.
            CorruptionError: the object ends before ``offset + len(out)``.
            StorageError: as for put; a short answer for a range that exists is retryable.
            StorageTimeoutError: if it is not retryable, a read hangs in the operating system and may still write to
                ``out`` at any later time: the buffer must never be used again.
        """

    @abc.abstractmethod
    async def head(self, key: str) -> ObjectInfo:
        """Return size and time of an object.

        Raises:
            ObjectNotFoundError: the key holds no object.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield every object whose key starts with ``prefix`` (a string prefix, not a folder), in order of keys.

        Always asks the storage: no listing is ever cached.
        """

    @abc.abstractmethod
    async def delete(self, key: str) -> None:
        """Remove an object; it is no error if there is none."""

    async def leftovers(self) -> Sequence[Leftover]:
        """Return what died puts left behind; a back end that leaves nothing returns an empty list."""
        return []

    async def remove_leftover(self, leftover: Leftover) -> None:
        """Remove one of ``leftovers``; it is no error if it is gone."""

    def copies(self) -> Sequence[Backend]:
        """Return the places that hold the objects, best first, each to be asked past every cache.

        One, unless there is a mirror: where bytes turn out to be wrong, a reader asks them again one by one.
        """
        return (self,)

    async def forget(self, key: str) -> None:
        """Drop what caches hold of an object, because it turned out to be wrong."""

    async def close(self) -> None:
        """Release connections and threads. A second call does nothing."""
