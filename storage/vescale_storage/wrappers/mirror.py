"""A second copy of a store: reads that the first cannot serve are served by the second, and nothing is written.

Only objects that never change can come from it: packs and manifests; what is newest, only the first copy knows. Missing
and short objects are found here. Wrong bytes only the reader can tell: it asks ``copies`` one by one (see ``Backend``).
Repairing the first copy is a step of its own (see ``repair``), for whoever decides it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeVar

from vescale_storage.errors import CorruptionError, ObjectNotFoundError, VeScaleError
from vescale_storage.keys import MANIFESTS_PREFIX, PACKS_PREFIX
from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from vescale_storage.backend import Backend

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MIRRORED: Final = (PACKS_PREFIX, MANIFESTS_PREFIX)


class MirrorBackend(WrapperBackend):
    """``primary``, helped out by ``second`` in reads of packs and manifests.

    Args:
        primary: the store; every write goes to it alone.
        second: a copy of the store, made by whatever copies objects, perhaps older than the store.
    """

    def __init__(self, primary: Backend, second: Backend) -> None:
        super().__init__(primary)
        self.second = second
        self.num_helped = 0
        """Reads that the second copy served."""
        self._told: set[str] = set()

    async def get(self, key: str) -> bytes:
        """Return the object, from the second copy where the first has none."""
        try:
            return await self.inner.get(key)
        except ObjectNotFoundError as error:
            return await self._help(key, error, lambda: self.second.get(key))

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill ``out``, from the second copy where the first has no object, or one that is too short."""
        try:
            await self.inner.get_into(key, offset, out)
        except (ObjectNotFoundError, CorruptionError) as error:
            await self._help(key, error, lambda: self.second.get_into(key, offset, out))

    def copies(self) -> Sequence[Backend]:
        """Return those of the first, then those of the second."""
        return (*self.inner.copies(), *self.second.copies())

    async def forget(self, key: str) -> None:
        """Pass on to both."""
        await self.inner.forget(key)
        await self.second.forget(key)

    async def close(self) -> None:
        """Close both."""
        try:
            await self.inner.close()
        finally:
            await self.second.close()

    async def _help(self, key: str, error: VeScaleError, ask: Callable[[], Awaitable[T]]) -> T:
        if not key.startswith(_MIRRORED):
            raise error
        try:
            found = await ask()
        except VeScaleError as other:
            message = f"{error.message}; its mirror does not help: {other.message}"
            raise type(error)(message, **error.context) from error
        self.num_helped += 1
        if key not in self._told:
            self._told.add(key)
            logger.warning("%s; read from the mirror %s - repair the store with heal()", error.message, self.second.url)
        return found
