from __future__ import annotations

import os
import struct
import uuid

import pytest

from vescale_storage import loop, pack
from vescale_storage.backends import open_backend
from vescale_storage.digest import digest, hexdigest
from vescale_storage.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from vescale_storage.keys import pack_key
from vescale_storage.pack import Codec, PackBuilder, PackEntry, decode_footer, encode_footer
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend


def memory():
    return open_backend(f"memory://{uuid.uuid4().hex}")


def build(*chunks: bytes) -> pack.Pack:
    builder = PackBuilder()
    for chunk in chunks:
        builder.add(digest(chunk), [chunk], Codec.RAW)
    return builder.finish()


def joined(made: pack.Pack) -> bytes:
    return b"".join(bytes(part) for part in made.payload)


# ---- building


def test_chunks_follow_each_other_from_byte_0_and_the_footer_ends_the_object():
    made = build(b"abc", b"defgh")
    data = joined(made)
    assert [(e.offset, e.length, e.codec) for e in made.entries] == [(0, 3, Codec.RAW), (3, 5, Codec.RAW)]
    assert data.startswith(b"abcdefgh")
    footer = data[8:]
    assert len(data) == made.size_bytes
    assert len(footer) == pack.footer_bytes(2) == 2 * 45 + 20
    assert made.name_hex == hexdigest(footer)
    assert data.endswith(b"VSPACK\x1a\n")
    assert decode_footer(footer, object_size_bytes=len(data), name=made.name_hex) == made.entries


def test_the_builder_knows_the_size_before_and_copies_nothing():
    builder = PackBuilder()
    assert len(builder) == 0
    parts = [bytearray(b"ab"), memoryview(b"cd"), b"e"]
    entry = builder.add(digest(b"abcde"), parts, Codec.ZSTD)
    assert entry == PackEntry(digest(b"abcde"), 0, 5, Codec.ZSTD)
    size = builder.size_bytes
    made = builder.finish()
    assert made.size_bytes == size == 5 + pack.footer_bytes(1)
    assert all(a is b for a, b in zip(made.payload, parts, strict=False))
    assert len(builder) == 1


def test_a_digest_is_stored_once():
    builder = PackBuilder()
    first = builder.add(digest(b"x"), [b"x"], Codec.RAW)
    builder.add(digest(b"y"), [b"y"], Codec.RAW)
    assert builder.add(digest(b"x"), [b"x"], Codec.RAW) == first
    assert [e.digest for e in builder.finish().entries] == [digest(b"x"), digest(b"y")]


def test_equal_chunks_make_equal_names_whatever_the_parts():
    whole, parts = PackBuilder(), PackBuilder()
    whole.add(digest(b"abcd"), [b"abcd"], Codec.RAW)
    parts.add(digest(b"abcd"), [b"ab", b"", b"cd"], Codec.RAW)
    assert whole.finish().name_hex == parts.finish().name_hex
    assert build(b"a", b"b").name_hex != build(b"b", b"a").name_hex


def test_an_empty_chunk_is_a_chunk_and_an_empty_pack_is_none():
    made = build(b"", b"a")
    assert [(e.offset, e.length) for e in made.entries] == [(0, 0), (0, 1)]
    footer = bytes(made.payload[-1])
    assert decode_footer(footer, object_size_bytes=made.size_bytes, name=made.name_hex) == made.entries
    with pytest.raises(ConfigError, match="without chunks"):
        PackBuilder().finish()


def test_chunks_that_the_table_cannot_describe_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="31 bytes"):
        PackBuilder().add(b"x" * 31, [b""], Codec.RAW)
    monkeypatch.setattr(pack, "MAX_CHUNK_BYTES", 4)
    builder = PackBuilder()
    builder.add(digest(b"abcd"), [b"abcd"], Codec.RAW)
    with pytest.raises(ConfigError, match="5 bytes"):
        builder.add(digest(b"abcde"), [b"abcde"], Codec.RAW)
    monkeypatch.setattr(pack, "MAX_ENTRIES", 1)
    with pytest.raises(ConfigError):
        builder.add(digest(b"b"), [b"b"], Codec.RAW)


# ---- footers that no builder makes


def footer_of(*rows: tuple[bytes, int, int, int], count=None, size=None, version=1, flags=0, magic=b"VSPACK\x1a\n"):
    table = b"".join(struct.pack("<32sQIB", *row) for row in rows)
    size = len(table) + 20 if size is None else size
    return table + struct.pack("<IIHH8s", len(rows) if count is None else count, size, version, flags, magic)


A, B = digest(b"a"), digest(b"b")


def test_the_hand_made_footer_is_the_real_one():
    made = build(b"a", b"b")
    assert footer_of((A, 0, 1, 0), (B, 1, 1, 0)) == made.payload[-1] == encode_footer(made.entries)


@pytest.mark.parametrize(
    ("footer", "stored_bytes"),
    [
        (b"", 0),
        (bytes(19), 0),
        (bytes(100), 0),
        (footer_of(), 0),
        (footer_of((A, 0, 1, 0), (B, 1, 1, 0)), 3),
        (footer_of((A, 0, 1, 0), (B, 1, 1, 0)), 1),
        (footer_of((A, 1, 1, 0), (B, 2, 1, 0)), 3),
        (footer_of((A, 0, 1, 0), (B, 2, 1, 0)), 3),
        (footer_of((A, 0, 2, 0), (B, 1, 1, 0)), 2),
        (footer_of((B, 1, 1, 0), (A, 0, 1, 0)), 2),
        (footer_of((A, 0, 1, 0), (A, 1, 1, 0)), 2),
        (footer_of((A, 0, 1, 2)), 1),
        (footer_of((A, 2**64 - 1, 1, 0)), 1),
        (footer_of((A, 0, 2**32 - 1, 0)), 1),
        (footer_of((A, 0, 1, 0), count=2), 1),
        (footer_of((A, 0, 1, 0), count=0), 1),
        (footer_of((A, 0, 1, 0), count=2**32 - 1), 1),
        (footer_of((A, 0, 1, 0), size=2**32 - 1), 1),
        (footer_of((A, 0, 1, 0), size=20), 1),
        (footer_of((A, 0, 1, 0), size=0), 1),
        (footer_of((A, 0, 1, 0), magic=b"VSPACK\r\n"), 1),
        (b"\x00" + footer_of((A, 0, 1, 0)), 0),
    ],
)
def test_footers_that_do_not_tile_the_object_are_corrupt(footer, stored_bytes):
    size = stored_bytes + len(footer)
    with pytest.raises(CorruptionError):
        decode_footer(footer, object_size_bytes=size)
    with pytest.raises(CorruptionError):
        decode_footer(footer, object_size_bytes=size, name=hexdigest(footer))


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 0}, {"flags": 1}])
def test_a_newer_pack_is_told_apart_from_damage(change):
    footer = footer_of((A, 0, 1, 0), **change)
    with pytest.raises(UnsupportedVersionError, match=r"this reader knows version 1"):
        decode_footer(footer, object_size_bytes=len(footer) + 1, name=hexdigest(footer))
    with pytest.raises(CorruptionError):  # the same bytes under another name were changed
        decode_footer(footer, object_size_bytes=len(footer) + 1, name=hexdigest(b""))


def test_a_newer_layout_of_the_table_is_no_damage_either():
    footer = bytes(7) + struct.pack("<IIHH8s", 3, 27, 2, 0, b"VSPACK\x1a\n")
    with pytest.raises(UnsupportedVersionError):
        decode_footer(footer, object_size_bytes=100, name=hexdigest(footer))


def test_every_flipped_byte_every_cut_and_every_addition_is_found_by_the_name():
    made = build(b"first", b"second", b"third")
    footer = bytes(made.payload[-1])
    for position in range(len(footer)):
        for bits in (0x01, 0x80, 0xFF):
            damaged = bytearray(footer)
            damaged[position] ^= bits
            with pytest.raises(CorruptionError):
                decode_footer(bytes(damaged), object_size_bytes=made.size_bytes, name=made.name_hex)
    for length in range(len(footer)):
        for part in (footer[:length], footer[length + 1 :]):
            with pytest.raises(CorruptionError):
                decode_footer(part, object_size_bytes=made.size_bytes, name=made.name_hex)
    for longer in (footer + b"\x00", b"\x00" + footer, footer + footer):
        with pytest.raises(CorruptionError):
            decode_footer(longer, object_size_bytes=made.size_bytes, name=made.name_hex)


def test_check_tail_proves_a_footer_with_chunks_before_it():
    made = build(b"first", b"second")
    data = joined(made)
    footer_size = pack.footer_bytes(2)
    for length in (footer_size, footer_size + 3, len(data)):
        assert pack.check_tail(data[-length:], object_size_bytes=len(data), name=made.name_hex) is True
    assert pack.check_tail(data[-30:], object_size_bytes=len(data), name=made.name_hex) is False
    damaged = bytearray(data)
    damaged[15] ^= 1  # in the table
    with pytest.raises(CorruptionError):
        pack.check_tail(bytes(damaged), object_size_bytes=len(data), name=made.name_hex)
    with pytest.raises(CorruptionError):
        pack.check_tail(data[:-1], object_size_bytes=len(data), name=made.name_hex)


# ---- in storage


def test_put_and_read_back():
    async def main():
        backend = memory()
        made = build(b"first", b"second")
        assert await pack.put_pack(backend, made) is True
        assert await backend.get(pack_key(made.name_hex)) == joined(made)
        assert await pack.put_pack(backend, made) is False
        assert await pack.read_footer(backend, made.name_hex, made.size_bytes) == made.entries

    loop.run(main())


def test_reading_a_footer_takes_one_request_and_a_huge_one_two():
    async def main():
        for num_chunks, requests in ((10, 1), (2000, 2)):
            backend = CountingBackend(memory())
            made = build(*[str(i).encode() for i in range(num_chunks)])
            await pack.put_pack(backend.inner, made)
            assert await pack.read_footer(backend, made.name_hex, made.size_bytes) == made.entries
            assert backend.counts.requests == {"get_into": requests}

    loop.run(main())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\x00",
        lambda data: data[:0],
        lambda data: b"\x00" * len(data),
        lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:],
    ],
)
def test_something_else_under_the_name_is_replaced(damage):
    async def main():
        backend = memory()
        made = build(b"first", b"second")
        await backend.put(pack_key(made.name_hex), [damage(joined(made))])
        assert await pack.put_pack(backend, made) is True
        assert await backend.get(pack_key(made.name_hex)) == joined(made)

    loop.run(main())


def test_another_pack_under_the_name_is_replaced():
    async def main():
        backend = memory()
        made, other = build(b"first", b"second"), build(b"first", b"other!")
        await backend.put(pack_key(made.name_hex), other.payload)
        with pytest.raises(CorruptionError):
            await pack.read_footer(backend, made.name_hex, made.size_bytes)
        assert await pack.put_pack(backend, made) is True

    loop.run(main())


def test_read_footer_of_what_is_no_such_pack():
    async def main():
        backend = memory()
        made = build(b"first", b"second")
        with pytest.raises(ObjectNotFoundError):
            await pack.read_footer(backend, made.name_hex, made.size_bytes)
        with pytest.raises(ConfigError):
            await pack.read_footer(backend, "nonsense", made.size_bytes)
        await pack.put_pack(backend, made)
        for size in (0, 19, made.size_bytes - 1, made.size_bytes + 1, 1 << 60):
            with pytest.raises(CorruptionError):
                await pack.read_footer(backend, made.name_hex, size)

    loop.run(main())


def test_a_pack_that_is_collected_between_put_and_look_is_put_again():
    async def main():
        inner = memory()
        backend = FaultBackend(inner)
        made = build(b"first")
        await pack.put_pack(inner, made)
        rule = backend.fail("head", ObjectNotFoundError("collected"))
        assert await pack.put_pack(backend, made) is False
        assert rule.num_hit == 1
        backend.fail("head", ObjectNotFoundError("collected"), times=100)
        with pytest.raises(ConflictError, match="stop whatever deletes packs"):
            await pack.put_pack(backend, made)

    loop.run(main())


def test_failures_of_the_storage_pass_through():
    async def main():
        backend = FaultBackend(memory())
        backend.fail("put_if_absent", StorageError("no network", retryable=True))
        with pytest.raises(StorageError, match="no network"):
            await pack.put_pack(backend, build(b"first"))

    loop.run(main())


def test_large_chunks_are_named_by_content():
    raw = os.urandom(1 << 20)
    builder = PackBuilder()
    codec, stored = pack.encode_chunk(raw, Codec.ZSTD, 4)
    builder.add(digest(raw), [stored], codec)
    made = builder.finish()
    entry = made.entries[0]
    assert pack.decode_chunk(joined(made)[entry.offset : entry.length], entry.codec, len(raw)) == raw
