"""Codecs: how a chunk's bytes are stored in a pack, and how they come back.

A stored chunk tells by itself how to undo it. The item size stands in it and is not taken from the tensor that asks:
chunks are shared by content, so a tensor may read a chunk that a tensor of another dtype has written.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import zstandard

from vescale_storage.errors import ConfigError, CorruptionError

if TYPE_CHECKING:
    from vescale_storage.backend import Buffer

ZSTD_LEVEL: Final = 1
"""Higher levels gain a few percent on weights and cost several times the CPU."""
MIN_SAVING: Final = 0.05
"""A chunk that does not shrink by this part is stored raw: decoding it would cost more than reading it."""
MAX_ITEM_BYTES: Final = 255
_MAX_EXPANSION: Final = 1 << 15
"""No zstd frame holds more: 128 KiB a block, and a block takes at least four bytes."""


class Codec(IntEnum):
    """How a stored chunk is encoded. Values are part of the format."""

    RAW = 0
    """The bytes themselves."""
    ZSTD = 1
    """One byte with the item size n, then a zstd frame of the n byte planes one after another."""


def encode_chunk(raw: Buffer, codec: Codec, item_bytes: int) -> tuple[Codec, Buffer]:
    """Return the codec used and the bytes to store: ``raw`` itself, uncopied, if ``codec`` is RAW or does not pay.

    ``item_bytes`` is the size of the items in ``raw``; items of 2 bytes and more are split in planes, as the high
    bytes of neighbours in a tensor are alike and the low ones are noise.

    Raises:
        ConfigError: ``item_bytes`` is not in 1..255.
    """
    if not 1 <= item_bytes <= MAX_ITEM_BYTES:
        raise ConfigError(f"cannot encode items of {item_bytes} bytes: expected 1 to {MAX_ITEM_BYTES}")
    if codec is Codec.RAW:
        return Codec.RAW, raw
    # A compressor costs 20 microseconds; sharing one between threads would corrupt both frames.
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(_to_planes(raw, item_bytes))
    stored = bytes((item_bytes,)) + frame
    if len(stored) > len(raw) * (1 - MIN_SAVING):
        return Codec.RAW, raw
    return Codec.ZSTD, stored


def decode_chunk(stored: Buffer, codec: Codec, raw_length: int) -> Buffer:
    """Return the chunk's ``raw_length`` bytes: ``stored`` itself, uncopied, if it is RAW.

    Does not check the digest. Allocates nothing before ``stored`` has shown that it can hold that much.

    Raises:
        CorruptionError: ``stored`` is not the encoding of ``raw_length`` bytes.
    """
    if codec is Codec.RAW:
        if len(stored) != raw_length:
            raise CorruptionError(f"cannot decode a raw chunk: {len(stored)} bytes are stored, expected {raw_length}")
        return stored
    if len(stored) < 1 or stored[0] == 0:
        raise CorruptionError("cannot decode a zstd chunk: it does not start with its item size")
    frame = memoryview(stored)[1:]
    if raw_length > len(frame) * _MAX_EXPANSION:
        raise CorruptionError(f"cannot decode a zstd chunk: {len(frame)} bytes cannot hold {raw_length}")
    try:
        # The library allocates what the frame's header says, whatever limit it is given: ask the header first.
        held = zstandard.frame_content_size(frame)
        if held != raw_length:
            raise CorruptionError(f"cannot decode a zstd chunk: its frame holds {held} bytes, expected {raw_length}")
        planes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"cannot decode a zstd chunk of {len(stored)} bytes: {error}") from error
    return _from_planes(planes, stored[0])


def raw_bytes(stored: Buffer, codec: Codec) -> int:
    """Return how many bytes the chunk says that it has, for who knows only its digest; nothing is proven by that.

    Raises:
        CorruptionError: it does not say.
    """
    if codec is Codec.RAW:
        return len(stored)
    try:
        held = zstandard.frame_content_size(memoryview(stored)[1:])
    except zstandard.ZstdError as error:
        raise CorruptionError(f"cannot tell the size of a zstd chunk of {len(stored)} bytes: {error}") from error
    if held < 0:
        raise CorruptionError(f"cannot tell the size of a zstd chunk of {len(stored)} bytes: its frame does not say")
    return int(held)


def _to_planes(raw: Buffer, item_bytes: int) -> Buffer:
    if item_bytes == 1:
        return raw
    # Slicing bytes with a step runs at C speed; slicing a memoryview so and then copying it is six times slower.
    data = bytes(raw) if isinstance(raw, memoryview) else raw
    return b"".join([data[plane::item_bytes] for plane in range(item_bytes)])


def _from_planes(planes: bytes, item_bytes: int) -> Buffer:
    if item_bytes == 1:
        return planes
    raw = bytearray(len(planes))
    start = 0
    for plane in range(item_bytes):
        stop = start + len(range(plane, len(raw), item_bytes))
        raw[plane::item_bytes] = planes[start:stop]
        start = stop
    return raw
