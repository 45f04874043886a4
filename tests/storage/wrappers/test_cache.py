import asyncio
import os
import uuid

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import CorruptionError, InvalidInputError, ObjectNotFoundError
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.testing import BackendConformance, read, refused
from vescale_storage.wrappers.cache import CacheBackend
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.retry import RetryBackend

PACK = pack_key("ab" * 32)
MANIFEST = manifest_key("cd" * 32)
CONTENT = bytes(range(256)) * 64 * 1024  # 16 MiB: several blocks
LIMIT = 256 * 2**20


class TestConformance(BackendConformance):
    """What it does not keep passes through it as if it were not there."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.folder = tmp_path

    def make(self):
        return CacheBackend(MemoryBackend(uuid.uuid4().hex), self.folder, LIMIT)


@pytest.fixture
def place(tmp_path):
    """A counting back end, and how to open caches before it."""
    counted = CountingBackend(MemoryBackend(uuid.uuid4().hex))
    asyncio.run(counted.put(PACK, [CONTENT]))
    asyncio.run(counted.put(MANIFEST, [CONTENT[: 5 * 2**20]]))
    return counted, lambda: CacheBackend(counted, tmp_path / "cache", LIMIT)


def test_a_second_reader_asks_the_storage_for_nothing(place):
    counted, cache = place

    async def check():
        first = cache()
        assert await read(first, PACK, 3, len(CONTENT) - 10) == CONTENT[3:-7]
        assert await first.get(MANIFEST) == CONTENT[: 5 * 2**20]
        before = counted.counts
        second = cache()
        assert await read(second, PACK, 3, len(CONTENT) - 10) == CONTENT[3:-7]
        assert await read(second, PACK, 5_000_000, 100) == CONTENT[5_000_000:5_000_100]
        assert await second.get(MANIFEST) == CONTENT[: 5 * 2**20]
        assert await read(second, MANIFEST, 7, 100) == CONTENT[7:107]
        assert (counted.counts - before).num_requests == 0
        assert (second.hit_bytes, second.missed_bytes) == (len(CONTENT) - 10 + 100 + 5 * 2**20 + 100, 0)

    asyncio.run(check())


def test_what_is_missing_costs_one_request_for_what_is_missing(place):
    counted, cache = place

    async def check():
        backend = cache()
        await read(backend, PACK, 1000, 1000)
        await read(backend, PACK, 3000, 1000)
        before = counted.counts
        assert await read(backend, PACK, 1500, 10_000) == CONTENT[1500:11_500]
        delta = counted.counts - before
        assert (dict(delta.requests), delta.down_bytes) == ({"get_into": 1}, 9500)
        assert (backend.hit_bytes, backend.missed_bytes) == (500, 11_500)

    asyncio.run(check())


def test_what_changes_is_never_kept(place, tmp_path):
    counted, cache = place

    async def check():
        backend = cache()
        for key in (
            "store.json",
            "refs/run/000000000001.000001",
            "refs/run/tags/x",
            "txn/ab/rank-0",
            "gc/mark",
            "probe/x",
        ):
            for content in (b"one", b"two"):
                await counted.put(key, [content])
                assert await backend.get(key) == content
                assert await read(backend, key, 0, 3) == content
        await backend.put("packs-not/x", [b"1"])
        await backend.get("packs-not/x")

    asyncio.run(check())
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_looking_and_listing_ask_the_storage(place):
    counted, cache = place

    async def check():
        backend = cache()
        await backend.get(MANIFEST)
        await counted.delete(MANIFEST)
        await refused(ObjectNotFoundError, backend.head(MANIFEST))
        assert [info.key async for info in backend.list("")] == [PACK]

    asyncio.run(check())


def test_writing_through_it_forgets(place):
    counted, cache = place

    async def check():
        backend = cache()
        for change in (
            backend.put(PACK, [b"other"]),
            backend.delete(PACK),
            backend.put_if_absent(PACK, [CONTENT]),
        ):
            await backend.get_into(PACK, 0, memoryview(bytearray(5)))
            await change
            if change.__name__ == "delete":
                await refused(ObjectNotFoundError, read(backend, PACK, 0, 5))
                await counted.put(PACK, [b"12345"])
                assert await read(backend, PACK, 0, 5) == b"12345"
                await counted.delete(PACK)
        assert await read(backend, PACK, 0, 5) == CONTENT[:5]

    asyncio.run(check())


def test_forgetting_reaches_through_wrappers_and_copies_lead_past_the_cache(place):
    counted, cache = place

    async def check():
        backend = cache()
        outer = CountingBackend(RetryBackend(backend))
        await read(outer, PACK, 0, 100)
        await counted.put(PACK, [CONTENT[::-1]])
        assert await read(outer, PACK, 0, 100) == CONTENT[:100]
        (copy,) = outer.copies()
        assert copy is counted
        assert await read(copy, PACK, 0, 100) == CONTENT[::-1][:100]
        await outer.forget(PACK)
        assert await read(outer, PACK, 0, 100) == CONTENT[::-1][:100]

    asyncio.run(check())


def test_a_wrapper_around_a_place_is_the_copy(place):
    counted, _ = place
    patient = RetryBackend(counted)
    assert patient.copies() == (patient,)
    assert counted.inner.copies() == (counted.inner,)


def test_refusals_are_those_of_the_storage_and_are_not_kept(place):
    counted, cache = place

    async def check():
        backend = cache()
        await refused(CorruptionError, read(backend, PACK, len(CONTENT) - 5, 10))
        await refused(InvalidInputError, read(backend, PACK, -1, 10))
        missing = pack_key("00" * 32)
        await refused(ObjectNotFoundError, read(backend, missing, 0, 10))
        await refused(ObjectNotFoundError, backend.get(missing))
        await counted.put(missing, [b"now there"])
        assert await backend.get(missing) == b"now there"
        await backend.get_into(missing, 0, memoryview(b""))

    asyncio.run(check())


def test_stores_in_one_folder_are_kept_apart(tmp_path):
    async def check():
        backends = []
        for number in range(2):
            inner = MemoryBackend(uuid.uuid4().hex)
            await inner.put(PACK, [bytes([number]) * 100])
            backends.append(CacheBackend(inner, tmp_path, LIMIT))
        for _ in range(2):
            for number, backend in enumerate(backends):
                assert await backend.get(PACK) == bytes([number]) * 100

    asyncio.run(check())


def test_a_read_only_folder_costs_the_cache_alone(place, monkeypatch, caplog):
    _, cache = place

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)

    async def check():
        backend = cache()
        for _ in range(3):
            assert await read(backend, PACK, 0, 1000) == CONTENT[:1000]
            assert len(await backend.get(MANIFEST)) == 5 * 2**20

    asyncio.run(check())
    assert [record.message.count("cannot write") for record in caplog.records] == [1]
