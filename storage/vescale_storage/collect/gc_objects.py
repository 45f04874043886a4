"""What lies under ``gc/``: marks and sweep records, read by collections and by the writers that heed them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_storage.collect.marks import (
    DEFAULT_GRACE_SECONDS,
    MARK_KIND,
    MAX_MARK_BYTES,
    OWNER_DIGITS,
    SWEEP_KIND,
    GcKey,
    Mark,
    Marked,
    Sweep,
    decode_mark,
    decode_sweep,
    mark_key,
    parse_gc_key,
)
from vescale_storage.errors import CorruptionError, FormatError, ObjectNotFoundError
from vescale_storage.keys import GC_PREFIX
from vescale_storage.parallel import map_bounded
from vescale_storage.sealed import MAX_RECORD_BYTES, read_bounded

if TYPE_CHECKING:
    from vescale_storage.backend import Backend, ObjectInfo

_NUM_READS: Final = 8


@dataclass(slots=True)
class GcListing:
    """What lies under ``gc/``."""

    marks: dict[str, Mark] = field(default_factory=dict)
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    """Names of marks that were changed after they were written."""
    clocks: list[ObjectInfo] = field(default_factory=list)
    """Left behind by collections that died."""
    strange: list[str] = field(default_factory=list)
    """Keys that no collection of this version makes."""


class MarkReader:
    """Reads the marks of one store, each once: they never change. For the event loop alone; calls may overlap."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[str, Mark] = {}

    async def marks(self) -> tuple[tuple[Mark, ...], tuple[str, ...]]:
        """Return the marks that there are, and the keys of those that cannot be read.

        Raises:
            StorageError: the storage failed.
        """
        infos = [info async for info in self._backend.list(mark_key(""))]
        # Not in ``self._known``: a call that listed at another time may be at work there.
        found = {info.key: self._known[info.key] for info in infos if info.key in self._known}
        unreadable: list[str] = []

        async def read(info: ObjectInfo) -> None:
            try:
                found[info.key] = await read_mark(self._backend, info)
            except ObjectNotFoundError:
                pass  # it is over
            except FormatError:
                unreadable.append(info.key)

        await map_bounded(read, [info for info in infos if info.key not in found], _NUM_READS)
        self._known = found
        return tuple(found[info.key] for info in infos if info.key in found), tuple(sorted(unreadable))

    async def marked(self) -> Marked:
        """Return what a writer that begins now must not refer to.

        Raises:
            StorageError: the storage failed.
        """
        marks, unreadable = await self.marks()
        return Marked(frozenset().union(*(mark.packs for mark in marks)), unreadable)


async def read_mark(backend: Backend, info: ObjectInfo) -> Mark:
    """Return a mark that was listed.

    Raises:
        ObjectNotFoundError: it is gone.
        CorruptionError, FormatError, UnsupportedVersionError: as for ``decode_mark``.
        StorageError: the storage failed.
    """
    return decode_mark(await read_bounded(backend, info.key, MAX_MARK_BYTES, info.size_bytes), info.key)


async def list_gc(backend: Backend) -> GcListing:
    """Return all that lies under ``gc/``.

    Raises:
        StorageError: the storage failed.
    """
    listing = GcListing()
    found: list[tuple[GcKey, ObjectInfo]] = []
    async for info in backend.list(GC_PREFIX):
        try:
            found.append((parse_gc_key(info.key), info))
        except FormatError:
            listing.strange.append(info.key)

    async def read(item: tuple[GcKey, ObjectInfo]) -> None:
        (kind, name), info = item
        try:
            if kind == MARK_KIND:
                listing.marks[name] = await read_mark(backend, info)
            elif kind == SWEEP_KIND:
                listing.sweeps[name] = await _read_sweep(backend, name, info)
            else:
                listing.clocks.append(info)
        except ObjectNotFoundError:
            pass  # over meanwhile
        except CorruptionError:
            listing.damaged.append(name)
        except FormatError:
            listing.strange.append(info.key)

    await map_bounded(read, found, _NUM_READS)
    return listing


async def _read_sweep(backend: Backend, name: str, info: ObjectInfo) -> Sweep:
    try:
        return decode_sweep(await read_bounded(backend, info.key, MAX_RECORD_BYTES, info.size_bytes), info.key)
    except CorruptionError:
        # That it is there says the most: nobody else may act on the mark. When it began is what the storage says.
        return Sweep(name, info.modified_seconds, DEFAULT_GRACE_SECONDS, "0" * OWNER_DIGITS)
