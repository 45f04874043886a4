"""Repair: a damaged pack or manifest of a store is written anew from its bytes in other copies of the store.

What an object has to be, it says itself: a manifest's name is its digest, and a pack's is that of its footer, which
has the digests of all chunks. So nothing is written that was not proven, and a pack can be put together from copies
that are all damaged, as long as each chunk is sound in one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_storage import loop
from vescale_storage.codec import decode_chunk, raw_bytes
from vescale_storage.digest import digest, hexdigest
from vescale_storage.errors import CorruptionError, FormatError, ObjectNotFoundError
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.pack import encode_footer, read_footer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_storage.backend import Backend
    from vescale_storage.pack import PackEntry


async def repair_manifest(copies: Sequence[Backend], name: str) -> bool:
    """Make sure that the first copy holds the manifest with this name; return whether it had to be written.

    Raises:
        CorruptionError: no copy holds it whole.
        StorageError: a copy cannot be read, or the first not be written.
    """
    key = manifest_key(name)
    for number, copy in enumerate(copies):
        try:
            content = await copy.get(key)
        except ObjectNotFoundError:
            continue
        if await loop.run_blocking(hexdigest, content) == name:
            if number:
                await copies[0].put(key, [content])
            return number > 0
    raise _beyond_repair(key, copies)


async def repair_pack(copies: Sequence[Backend], name: str, size_bytes: int) -> bool:
    """Make sure that the first copy holds the pack with this name and size; return whether it had to be written.

    Reads all of it, into memory, and so with every further copy as long as there is damage.

    Raises:
        CorruptionError: some of its bytes are wrong in every copy.
        StorageError: a copy cannot be read, or the first not be written.
    """
    key = pack_key(name)
    bodies: list[bytearray] = []
    entries: tuple[PackEntry, ...] | None = None
    for number, copy in enumerate(copies):
        body = await _whole(copy, key, size_bytes)
        if body is None:
            continue
        bodies.append(body)
        entries = entries or await _footer(copy, name, size_bytes)
        if entries is not None and await loop.run_blocking(_make_sound, bodies, entries):
            if number:
                await copies[0].put(key, [bodies[0]])
            return number > 0
    raise _beyond_repair(key, copies)


async def _whole(copy: Backend, key: str, size_bytes: int) -> bytearray | None:
    body = bytearray(size_bytes)
    try:
        if (await copy.head(key)).size_bytes != size_bytes:
            return None
        await copy.get_into(key, 0, memoryview(body))
    except (ObjectNotFoundError, CorruptionError):
        return None
    return body


async def _footer(copy: Backend, name: str, size_bytes: int) -> tuple[PackEntry, ...] | None:
    try:
        return await read_footer(copy, name, size_bytes)
    except (ObjectNotFoundError, FormatError):
        return None


def _make_sound(bodies: Sequence[bytearray], entries: Sequence[PackEntry]) -> bool:
    """Make the first body what the footer says, with chunks of the others; return whether that is possible."""
    target = bodies[0]
    for entry in entries:
        place = slice(entry.offset, entry.offset + entry.length)
        sound = next((body for body in bodies if _is_sound(memoryview(body)[place], entry)), None)
        if sound is None:
            return False
        if sound is not target:
            target[place] = sound[place]
    footer = encode_footer(entries)
    target[len(target) - len(footer) :] = footer
    return True


def _is_sound(stored: memoryview, entry: PackEntry) -> bool:
    try:
        raw = decode_chunk(stored, entry.codec, raw_bytes(stored, entry.codec))
    except CorruptionError:
        return False
    return digest(raw) == entry.digest


def _beyond_repair(key: str, copies: Sequence[Backend]) -> CorruptionError:
    return CorruptionError(
        f"cannot repair {key!r}: some of it is missing or damaged in each of {', '.join(copy.url for copy in copies)}; "
        "bring it back from another copy, or load another snapshot",
        key=key,
    )
