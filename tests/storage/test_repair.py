import asyncio
import random
import uuid

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.codec import Codec, encode_chunk
from vescale_storage.digest import digest, hexdigest
from vescale_storage.errors import AccessDeniedError, CorruptionError
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.pack import PackBuilder, footer_bytes
from vescale_storage.repair import repair_manifest, repair_pack
from vescale_storage.testing import refused
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend


def chunks():
    noise = random.Random(3)
    return [noise.randbytes(1000), bytes(4000), b"x", noise.randbytes(77), bytes(range(256)) * 8]


def made_pack():
    builder = PackBuilder()
    for raw in chunks():
        codec, stored = encode_chunk(raw, Codec.ZSTD, 4)
        builder.add(digest(raw), [stored], codec)
    return builder.finish()


PACK = made_pack()
WHOLE = b"".join(PACK.payload)
KEY = pack_key(PACK.name_hex)
FOOTER = len(WHOLE) - footer_bytes(len(PACK.entries))


def flipped(*positions):
    data = bytearray(WHOLE)
    for position in positions:
        data[position] ^= 1
    return bytes(data)


def at(chunk):
    """Return the position of a byte in a chunk."""
    return PACK.entries[chunk].offset + PACK.entries[chunk].length // 2


async def places(first, second):
    backends = []
    for content in (first, second):
        backend = CountingBackend(MemoryBackend(uuid.uuid4().hex))
        if content is not None:
            await backend.put(KEY, [content])
        backends.append(backend)
    return backends


def repair(first, second):
    """Return whether it was written, what the first copy then holds, and what was put to the second."""

    async def run():
        copies = await places(first, second)
        before = copies[1].counts
        written = await repair_pack(copies, PACK.name_hex, PACK.size_bytes)
        assert (copies[1].counts - before).up_bytes == 0
        return written, await copies[0].get(KEY)

    return asyncio.run(run())


def test_the_pack_has_raw_and_compressed_chunks():
    assert {entry.codec for entry in PACK.entries} == set(Codec)


def test_a_sound_pack_is_left_as_it_is_and_the_second_copy_is_not_asked():
    async def check():
        copies = await places(WHOLE, None)
        before = [copy.counts for copy in copies]
        assert not await repair_pack(copies, PACK.name_hex, PACK.size_bytes)
        assert (copies[0].counts - before[0]).up_bytes == 0
        assert (copies[1].counts - before[1]).num_requests == 0

    asyncio.run(check())


@pytest.mark.parametrize("chunk", range(len(PACK.entries)))
def test_a_damaged_chunk_is_taken_from_the_second_copy(chunk):
    assert repair(flipped(at(chunk)), WHOLE) == (True, WHOLE)


@pytest.mark.parametrize(
    "first",
    [
        None,
        b"",
        WHOLE[:-1],
        WHOLE + b"x",
        WHOLE[:FOOTER],
        flipped(FOOTER + 3),
        flipped(len(WHOLE) - 1),
        bytes(len(WHOLE)),
    ],
)
def test_a_pack_lost_cut_or_without_footer_is_taken_from_the_second_copy(first):
    assert repair(first, WHOLE) == (True, WHOLE)


def test_two_damaged_copies_make_one_that_is_sound():
    assert repair(flipped(at(0), at(3), FOOTER + 3), flipped(at(1), at(4))) == (True, WHOLE)
    assert repair(flipped(at(1), at(4)), flipped(at(0), at(3), FOOTER + 3)) == (True, WHOLE)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (flipped(at(1)), flipped(at(1))),
        (flipped(at(1)), None),
        (None, None),
        (flipped(FOOTER), flipped(FOOTER + 1)),
        (WHOLE[:-1], flipped(at(2))),
    ],
)
def test_what_no_copy_has_is_beyond_repair_and_nothing_is_written(first, second):
    async def check():
        copies = await places(first, second)
        before = [copy.counts for copy in copies]
        error = await refused(CorruptionError, repair_pack(copies, PACK.name_hex, PACK.size_bytes))
        assert error.context["key"] == KEY
        for copy, counts in zip(copies, before, strict=True):
            assert copy.url in error.message
            assert (copy.counts - counts).up_bytes == 0

    asyncio.run(check())


def test_manifests():
    content = b"a manifest"
    name = hexdigest(content)
    key = manifest_key(name)

    async def check():
        first, second = (MemoryBackend(uuid.uuid4().hex) for _ in range(2))
        await refused(CorruptionError, repair_manifest([first, second], name))
        await second.put(key, [content])
        for damaged in (None, b"", b"a manifesT"):
            if damaged is not None:
                await first.put(key, [damaged])
            assert await repair_manifest([first, second], name)
            assert await first.get(key) == content
        assert not await repair_manifest([first, second], name)
        await first.put(key, [b"1"])
        await second.put(key, [b"2"])
        await refused(CorruptionError, repair_manifest([first, second], name))

    asyncio.run(check())


def test_storage_that_fails_is_no_damage():
    async def check():
        first, second = await places(flipped(at(1)), WHOLE)
        faults = FaultBackend(first)
        faults.fail("put", AccessDeniedError("no"))
        await refused(AccessDeniedError, repair_pack([faults, second], PACK.name_hex, PACK.size_bytes))
        faults.fail("get_into", AccessDeniedError("no"))
        await refused(AccessDeniedError, repair_pack([faults, second], PACK.name_hex, PACK.size_bytes))

    asyncio.run(check())
