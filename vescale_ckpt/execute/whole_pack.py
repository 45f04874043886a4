"""A whole pack: read at once and proven by its own footer, for who copies or checks packs and not tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import CorruptionError
from vescale_storage.codec import decode_chunk, raw_bytes
from vescale_storage.digest import digest
from vescale_storage.keys import pack_key
from vescale_storage.pack import encode_footer, read_footer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_storage.backend import Backend, Buffer
    from vescale_storage.pack import PackEntry


@dataclass(frozen=True, slots=True)
class WholePack:
    """The bytes of a pack whose footer is right."""

    name: str
    body: bytearray
    entries: tuple[PackEntry, ...]


async def read_whole_pack(backend: Backend, name: str, size_bytes: int) -> WholePack:
    """Return a pack with its footer proven; its chunks are for ``damaged_entries`` to prove.

    Raises:
        CorruptionError: it is shorter, or its footer is not the one that was written.
        ObjectNotFoundError: it is gone.
        StorageError: the storage failed.
    """
    entries = await read_footer(backend, name, size_bytes)
    body = bytearray(size_bytes)
    await backend.get_into(pack_key(name), 0, memoryview(body))
    footer = encode_footer(entries)
    if body[size_bytes - len(footer) :] != footer:
        raise CorruptionError(f"cannot read {pack_key(name)!r}: its footer was right and then another one")
    return WholePack(name, body, entries)


def damaged_entries(body: Buffer, entries: Sequence[PackEntry]) -> list[PackEntry]:
    """Return the chunks of a pack whose bytes are not what their digests say; slow, not for the event loop."""
    view = memoryview(body)
    return [entry for entry in entries if not is_sound(view[entry.offset : entry.offset + entry.length], entry)]


def is_sound(stored: memoryview, entry: PackEntry) -> bool:
    """Return whether stored bytes are the chunk that an entry names."""
    try:
        raw = decode_chunk(stored, entry.codec, raw_bytes(stored, entry.codec))
    except CorruptionError:
        return False
    return digest(raw) == entry.digest
