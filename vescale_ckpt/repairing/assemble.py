"""Assembling: a damaged or missing pack put together from whatever copies of its chunks are left.

Its own object may still hold most of them; equal chunks may lie in other packs, because two saves wrote them before
either could see the other's; and a mirror may have the pack whole. Every chunk is proven before it is used.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from vescale_ckpt.errors import CorruptionError, FormatError, ObjectNotFoundError
from vescale_ckpt.execute.whole_pack import is_sound
from vescale_storage.keys import pack_key
from vescale_storage.pack import encode_footer, read_footer
from vescale_storage.parallel import map_bounded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vescale_storage.backend import Backend
    from vescale_storage.pack import PackEntry

_NUM_FOOTERS = 16


class Assembler:
    """Finds chunks in all packs of a store and of its mirrors."""

    def __init__(self, backend: Backend, mirrors: Sequence[Backend], packs: Mapping[str, int]) -> None:
        self._backend = backend
        self._mirrors = mirrors
        self._packs = packs
        self._places: dict[bytes, list[tuple[str, PackEntry]]] | None = None

    async def assemble(
        self, name: str, size_bytes: int, entries: Sequence[PackEntry]
    ) -> tuple[bytearray, list[PackEntry]]:
        """Return a pack's bytes, and the chunks of which no sound copy is left; the bytes are whole if none is."""
        body = bytearray(size_bytes)
        lost = []
        for entry in entries:
            found = await self._find(name, entry)
            if found is None:
                lost.append(entry)
            else:
                body[entry.offset : entry.offset + entry.length] = found
        footer = encode_footer(entries)
        body[size_bytes - len(footer) :] = footer
        return body, lost

    async def footer(self, name: str, size_bytes: int) -> tuple[PackEntry, ...] | None:
        """Return the entries of a pack by the footer that a mirror has of it, or None."""
        for mirror in self._mirrors:
            with contextlib.suppress(FormatError, ObjectNotFoundError):
                return await read_footer(mirror, name, size_bytes)
        return None

    async def _find(self, name: str, entry: PackEntry) -> bytearray | None:
        for backend in (self._backend, *self._mirrors):
            stored = await _read(backend, name, entry)
            if stored is not None:
                return stored
        for pack, other in await self._elsewhere(entry.digest):
            # Its place in the footer is fixed, so only stored bytes of this codec and length will do.
            if pack != name and (other.codec, other.length) == (entry.codec, entry.length):
                stored = await _read(self._backend, pack, other)
                if stored is not None:
                    return stored
        return None

    async def _elsewhere(self, digest: bytes) -> Collection[tuple[str, PackEntry]]:
        """Return where else in the store a chunk lies, by the footers of all packs, which are read once."""
        if self._places is None:
            places: dict[bytes, list[tuple[str, PackEntry]]] = {}

            async def read(item: tuple[str, int]) -> None:
                with contextlib.suppress(FormatError, ObjectNotFoundError):
                    for entry in await read_footer(self._backend, *item):
                        places.setdefault(entry.digest, []).append((item[0], entry))

            await map_bounded(read, self._packs.items(), _NUM_FOOTERS)
            self._places = places
        return self._places.get(digest, [])


async def _read(backend: Backend, pack: str, entry: PackEntry) -> bytearray | None:
    """Return the stored bytes of a chunk if they are sound."""
    stored = bytearray(entry.length)
    try:
        await backend.get_into(pack_key(pack), entry.offset, memoryview(stored))
    except (ObjectNotFoundError, CorruptionError):
        return None
    return stored if is_sound(memoryview(stored), entry) else None
