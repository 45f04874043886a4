"""A pack: one immutable object with many stored chunks and a footer that lists them.

Few large objects are what storage is fast at. The footer makes a pack readable alone, and its digest is the pack's
name, so that a retried save makes the same names and finds its own objects there already.

Layout, little-endian: the stored chunks one after another from byte 0; one table row a chunk (digest, offset, length,
codec); the trailer (number of entries, size of table and trailer, version, flags, magic).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from vescale_storage.codec import Codec, decode_chunk, encode_chunk
from vescale_storage.digest import DIGEST_BYTES, hexdigest
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    CorruptionError,
    ObjectNotFoundError,
    UnsupportedVersionError,
)
from vescale_storage.keys import pack_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_storage.backend import Backend, Buffer, Payload

__all__ = [
    "ENTRY_BYTES",
    "FOOTER_TRAILER_BYTES",
    "PACK_MAGIC",
    "PACK_VERSION",
    "Codec",
    "Pack",
    "PackBuilder",
    "PackEntry",
    "check_tail",
    "decode_chunk",
    "decode_footer",
    "encode_chunk",
    "encode_footer",
    "footer_bytes",
    "put_pack",
    "read_footer",
]

PACK_MAGIC: Final = b"VSPACK\x1a\n"
"""Last bytes of every pack; the end-of-file and line-feed bytes show a transfer that took it for text."""
PACK_VERSION: Final = 1

_ENTRY: Final = struct.Struct(f"<{DIGEST_BYTES}sQIB")
_TRAILER: Final = struct.Struct("<IIHH8s")
ENTRY_BYTES: Final = _ENTRY.size
FOOTER_TRAILER_BYTES: Final = _TRAILER.size
MAX_CHUNK_BYTES: Final = (1 << 32) - 1
MAX_ENTRIES: Final = ((1 << 32) - 1 - FOOTER_TRAILER_BYTES) // ENTRY_BYTES
_TAIL_BYTES: Final = 64 * 1024
"""Read at once from a pack's end: holds the footer of 1,400 chunks, so that one request is the rule."""
_PUT_ATTEMPTS: Final = 3


class PackEntry(NamedTuple):
    """One stored chunk: where it lies in its pack and what it is."""

    digest: bytes
    """Of the chunk's bytes before the codec."""
    offset: int
    length: int
    """Stored bytes."""
    codec: Codec


@dataclass(frozen=True, slots=True)
class Pack:
    """A finished pack, ready to be put."""

    name_hex: str
    """BLAKE3 of the footer."""
    payload: Payload
    """The whole object; holds the buffers that were added, uncopied."""
    size_bytes: int
    entries: tuple[PackEntry, ...]


class PackBuilder:
    """Collects stored chunks into one pack. Copies nothing: the caller keeps the buffers unchanged until the put."""

    def __init__(self) -> None:
        self._entries: dict[bytes, PackEntry] = {}
        self._parts: list[Buffer] = []
        self._stored_bytes = 0

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Size of the whole object if it were finished now."""
        return self._stored_bytes + footer_bytes(len(self._entries))

    def add(self, digest: bytes, parts: Payload, codec: Codec) -> PackEntry:
        """Append a chunk, stored as ``parts`` one after another, and return its entry.

        A digest that the pack holds already is not stored twice: its entry is returned and ``parts`` are dropped.

        Raises:
            ConfigError: the digest has not 32 bytes, or the chunk or the pack gets too large.
        """
        if len(digest) != DIGEST_BYTES:
            raise ConfigError(f"cannot add a chunk with a digest of {len(digest)} bytes: expected {DIGEST_BYTES}")
        known = self._entries.get(digest)
        if known is not None:
            return known
        length = sum(len(part) for part in parts)
        if length > MAX_CHUNK_BYTES or len(self._entries) >= MAX_ENTRIES:
            raise ConfigError(
                f"cannot add a chunk of {length} bytes as number {len(self._entries)}: a chunk has at most "
                f"{MAX_CHUNK_BYTES} bytes and a pack {MAX_ENTRIES} chunks"
            )
        entry = PackEntry(digest, self._stored_bytes, length, codec)
        self._entries[digest] = entry
        self._parts.extend(parts)
        self._stored_bytes += length
        return entry

    def finish(self) -> Pack:
        """Return the pack; the builder may go on afterwards, towards another pack that begins with the same chunks.

        Raises:
            ConfigError: nothing was added.
        """
        if not self._entries:
            raise ConfigError("cannot finish a pack without chunks: put no pack at all")
        entries = tuple(self._entries.values())
        footer = encode_footer(entries)
        return Pack(hexdigest(footer), (*self._parts, footer), self._stored_bytes + len(footer), entries)


def footer_bytes(num_entries: int) -> int:
    """Return the size of the footer that lists this many chunks."""
    return num_entries * ENTRY_BYTES + FOOTER_TRAILER_BYTES


def encode_footer(entries: Sequence[PackEntry]) -> bytes:
    """Return the footer, table and trailer; its BLAKE3 is the pack's name."""
    size = footer_bytes(len(entries))
    table = [_ENTRY.pack(*entry) for entry in entries]
    return b"".join([*table, _TRAILER.pack(len(entries), size, PACK_VERSION, 0, PACK_MAGIC)])


def decode_footer(data: bytes, *, object_size_bytes: int, name: str | None = None) -> tuple[PackEntry, ...]:
    """Return the entries of a footer, proven to tile the object's other bytes from 0 on without gap or overlap.

    ``data`` is the footer exactly, and ``object_size_bytes`` the size of the whole pack. With the pack's ``name``, the
    footer is also proven to be the one that was written.

    Raises:
        CorruptionError: any of it does not hold.
        UnsupportedVersionError: a newer writer made the pack.
    """
    what = f"the footer of pack {name}" if name else "a pack's footer"
    size = _footer_size(data, object_size_bytes, what)
    if size != len(data):
        raise CorruptionError(f"cannot read {what}: it says that it has {size} bytes, found {len(data)}", pack=name)
    if name is not None and hexdigest(data) != name:
        raise CorruptionError(f"cannot read {what}: its BLAKE3 is {hexdigest(data)}, which is not its name", pack=name)
    num_entries, _, version, flags, _ = _TRAILER.unpack_from(data, len(data) - FOOTER_TRAILER_BYTES)
    if version != PACK_VERSION or flags != 0:
        raise UnsupportedVersionError(
            f"cannot read {what}: it has version {version} and flags {flags:#x}, this reader knows version "
            f"{PACK_VERSION} without flags; upgrade vescale-ckpt",
            pack=name,
        )
    if footer_bytes(num_entries) != len(data):
        raise CorruptionError(
            f"cannot read {what}: {num_entries} entries take {footer_bytes(num_entries)} bytes, found {len(data)}",
            pack=name,
        )
    return _decode_table(memoryview(data)[: num_entries * ENTRY_BYTES], object_size_bytes - len(data), what)


def check_tail(tail: bytes, *, object_size_bytes: int, name: str) -> bool:
    """Prove that ``tail``, the last bytes of a pack, ends with the footer that was written; chunks may stand before it.

    Returns whether it did: a tail that is shorter than the footer proves no more than the trailer.

    Raises:
        CorruptionError: the footer is not that of the pack with this name.
        UnsupportedVersionError: a newer writer made the pack.
    """
    size = _footer_size(tail, object_size_bytes, f"the footer of {pack_key(name)!r}")
    if size > len(tail):
        return False
    decode_footer(tail[len(tail) - size :], object_size_bytes=object_size_bytes, name=name)
    return True


def _footer_size(tail: bytes, object_size_bytes: int, what: str) -> int:
    """Return how many bytes at the object's end are its footer: the one field that every version has in one place."""
    if len(tail) < FOOTER_TRAILER_BYTES:
        raise CorruptionError(f"cannot read {what}: {len(tail)} bytes are too few for a trailer")
    _, size, _, _, magic = _TRAILER.unpack_from(tail, len(tail) - FOOTER_TRAILER_BYTES)
    if magic != PACK_MAGIC:
        raise CorruptionError(f"cannot read {what}: it ends with {magic!r}, not with {PACK_MAGIC!r}")
    if not FOOTER_TRAILER_BYTES <= size <= object_size_bytes:
        raise CorruptionError(f"cannot read {what}: {size} bytes of footer in an object of {object_size_bytes}")
    return int(size)


def _decode_table(table: memoryview, stored_bytes: int, what: str) -> tuple[PackEntry, ...]:
    entries: list[PackEntry] = []
    seen: set[bytes] = set()
    end = 0
    for row, (digest, offset, length, codec) in enumerate(_ENTRY.iter_unpack(table)):
        if offset != end:
            raise CorruptionError(f"cannot read {what}: entry {row} starts at byte {offset}, expected {end}")
        if codec not in _CODECS:
            raise CorruptionError(f"cannot read {what}: entry {row} has codec {codec}, known are {sorted(_CODECS)}")
        if digest in seen:
            raise CorruptionError(f"cannot read {what}: entry {row} repeats the digest {digest.hex()}")
        seen.add(digest)
        entries.append(PackEntry(digest, offset, length, _CODECS[codec]))
        end += length
    if end != stored_bytes or not entries:
        raise CorruptionError(f"cannot read {what}: its {len(entries)} chunks take {end} bytes of {stored_bytes}")
    return tuple(entries)


_CODECS: Final = {int(codec): codec for codec in Codec}


async def read_footer(backend: Backend, name: str, size_bytes: int) -> tuple[PackEntry, ...]:
    """Return the entries of the pack with this name and size, proven as by ``decode_footer``; mostly one request.

    Raises:
        CorruptionError: the object is not that pack.
        ObjectNotFoundError: there is no such object.
        UnsupportedVersionError: a newer writer made the pack.
    """
    key = pack_key(name)
    if size_bytes < FOOTER_TRAILER_BYTES:
        raise CorruptionError(f"cannot read the footer of {key!r}: {size_bytes} bytes are too few for a pack", key=key)
    tail = await _read_end(backend, key, size_bytes, min(size_bytes, _TAIL_BYTES))
    size = _footer_size(tail, size_bytes, f"the footer of {key!r}")
    if size > len(tail):
        tail = await _read_end(backend, key, size_bytes, size)
    return decode_footer(tail[len(tail) - size :], object_size_bytes=size_bytes, name=name)


async def _read_end(backend: Backend, key: str, size_bytes: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    await backend.get_into(key, size_bytes - num_bytes, memoryview(data))
    return bytes(data)


async def put_pack(backend: Backend, pack: Pack) -> bool:
    """Write the pack and return True, or False if an earlier attempt has written it already.

    What stands under its name is believed only if it has the size and the footer of this pack; anything else is damage
    and is overwritten.

    Raises:
        ConflictError: the object came and went three times: something deletes packs that are being written.
        StorageError: the storage failed.
    """
    key = pack_key(pack.name_hex)
    for _ in range(_PUT_ATTEMPTS):
        try:
            await backend.put_if_absent(key, pack.payload)
        except AlreadyExistsError:
            pass
        else:
            return True
        try:
            if await _is_whole(backend, key, pack):
                return False
        except ObjectNotFoundError:
            continue  # collected between the two requests: put it again
        await backend.put(key, pack.payload)
        return True
    raise ConflictError(
        f"cannot put {key!r}: it existed at each of {_PUT_ATTEMPTS} puts and was gone at each look; stop whatever "
        "deletes packs that are being written",
        key=key,
    )


async def _is_whole(backend: Backend, key: str, pack: Pack) -> bool:
    info = await backend.head(key)
    if info.size_bytes != pack.size_bytes:
        return False
    try:
        return await read_footer(backend, pack.name_hex, pack.size_bytes) == pack.entries
    except CorruptionError:
        return False
