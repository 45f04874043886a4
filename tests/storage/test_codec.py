from __future__ import annotations

import os
import struct

import pytest
import zstandard

from vescale_storage.codec import Codec, decode_chunk, encode_chunk, raw_bytes
from vescale_storage.errors import ConfigError, CorruptionError


def smooth_floats(num_items: int) -> bytes:
    return b"".join(struct.pack("<f", 1 + i / num_items) for i in range(num_items))


def test_values_are_part_of_the_format():
    assert [(codec.name, int(codec)) for codec in Codec] == [("RAW", 0), ("ZSTD", 1)]


@pytest.mark.parametrize("item_bytes", [1, 2, 3, 4, 8, 16, 255])
@pytest.mark.parametrize("num_bytes", [1, 7, 255, 256, 4096, 4099])
def test_every_length_and_item_size_comes_back(item_bytes, num_bytes):
    raw = bytes(i * i // 64 % 7 for i in range(num_bytes))
    for data in (raw, bytearray(raw), memoryview(raw), memoryview(bytearray(raw))):
        codec, stored = encode_chunk(data, Codec.ZSTD, item_bytes)
        assert decode_chunk(stored, codec, num_bytes) == raw
        assert decode_chunk(memoryview(stored), codec, num_bytes) == raw


def test_planes_make_floats_smaller_than_zstd_alone():
    raw = smooth_floats(20_000)
    codec, with_planes = encode_chunk(raw, Codec.ZSTD, 4)
    assert codec is Codec.ZSTD
    without = zstandard.ZstdCompressor(level=1).compress(raw)
    assert len(with_planes) < 0.8 * len(without)
    assert len(with_planes) < 0.7 * len(raw)


def test_a_chunk_that_does_not_shrink_by_a_twentieth_is_stored_raw_and_uncopied():
    noise = os.urandom(10_000)
    codec, stored = encode_chunk(noise, Codec.ZSTD, 4)
    assert codec is Codec.RAW
    assert stored is noise
    almost = os.urandom(9_700) + bytes(300)  # shrinks by some 3 %
    assert encode_chunk(almost, Codec.ZSTD, 1)[0] is Codec.RAW
    better = os.urandom(9_000) + bytes(1_000)
    assert encode_chunk(better, Codec.ZSTD, 1)[0] is Codec.ZSTD


def test_raw_copies_nothing_in_either_direction():
    raw = memoryview(bytearray(b"abc"))
    assert encode_chunk(raw, Codec.RAW, 1) == (Codec.RAW, raw)
    assert encode_chunk(raw, Codec.RAW, 1)[1] is raw
    assert decode_chunk(raw, Codec.RAW, 3) is raw
    assert encode_chunk(b"", Codec.ZSTD, 4) == (Codec.RAW, b"")


def test_a_tensor_of_another_dtype_can_read_the_chunk():
    raw = smooth_floats(1000)
    codec, stored = encode_chunk(raw, Codec.ZSTD, 4)
    assert stored[0] == 4
    assert decode_chunk(stored, codec, len(raw)) == raw  # nobody has to know that the items were floats


@pytest.mark.parametrize("item_bytes", [0, -1, 256])
def test_impossible_item_sizes_are_refused(item_bytes):
    with pytest.raises(ConfigError):
        encode_chunk(b"abcd", Codec.ZSTD, item_bytes)


def stored_zeros(num_bytes: int) -> bytes:
    codec, stored = encode_chunk(bytes(num_bytes), Codec.ZSTD, 4)
    assert codec is Codec.ZSTD
    return bytes(stored)


def frame_that_claims(content_bytes: int) -> bytes:
    """Return a frame whose header says ``content_bytes``, whatever follows."""
    return b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", content_bytes) + bytes(50)


@pytest.mark.parametrize(
    ("stored", "codec", "raw_length"),
    [
        (b"abc", Codec.RAW, 4),
        (b"abc", Codec.RAW, 2),
        (b"", Codec.ZSTD, 4),
        (b"\x04", Codec.ZSTD, 0),
        (b"\x00" + stored_zeros(4096)[1:], Codec.ZSTD, 4096),
        (stored_zeros(4096), Codec.ZSTD, 4097),
        (stored_zeros(4096), Codec.ZSTD, 4095),
        (stored_zeros(4096), Codec.ZSTD, 1 << 50),
        (stored_zeros(4096) + b"\x00", Codec.ZSTD, 4096),
        (stored_zeros(4096)[:-1], Codec.ZSTD, 4096),
        (b"\x01" + frame_that_claims(1 << 50), Codec.ZSTD, 1 << 50),
        (b"\x01" + frame_that_claims(1 << 62), Codec.ZSTD, 1 << 62),
        (b"\x01" + frame_that_claims(1000), Codec.ZSTD, 1000),
        (b"\x01" + os.urandom(100), Codec.ZSTD, 1000),
        (
            b"\x01" + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5000)),
            Codec.ZSTD,
            5000,
        ),
    ],
)
def test_what_is_no_encoding_of_so_many_bytes_is_corrupt(stored, codec, raw_length):
    with pytest.raises(CorruptionError):
        decode_chunk(stored, codec, raw_length)


def test_the_densest_frame_is_not_taken_for_a_lie():
    for num_bytes in (1 << 20, 1 << 24):
        assert decode_chunk(stored_zeros(num_bytes), Codec.ZSTD, num_bytes) == bytes(num_bytes)


def test_a_chunk_tells_how_many_bytes_it_has():
    assert raw_bytes(b"abc", Codec.RAW) == 3
    assert raw_bytes(stored_zeros(4096), Codec.ZSTD) == 4096
    assert raw_bytes(b"\x01" + frame_that_claims(1 << 40), Codec.ZSTD) == 1 << 40


@pytest.mark.parametrize(
    "stored",
    [b"", b"\x04", b"\x01" + b"no frame", b"\x01" + zstandard.ZstdCompressor(write_content_size=False).compress(b"x")],
)
def test_a_chunk_that_does_not_tell_its_size_is_corrupt(stored):
    with pytest.raises(CorruptionError):
        raw_bytes(stored, Codec.ZSTD)
