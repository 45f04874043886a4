import asyncio
import uuid

import pytest

from vescale_storage.backend import Leftover
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import ObjectNotFoundError, StorageError
from vescale_storage.testing import BackendConformance, keys_of, read
from vescale_storage.wrappers.count import Counters, CountingBackend, Counts
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy


class TestConformance(BackendConformance):
    def make(self):
        return CountingBackend(MemoryBackend(uuid.uuid4().hex))


def test_every_verb_is_counted_with_its_bytes():
    async def check():
        backend = CountingBackend(MemoryBackend(uuid.uuid4().hex))
        await backend.put("a", [b"12345", b"67"])
        await backend.put_if_absent("b", [b"123"])
        await backend.get("a")
        await read(backend, "a", 1, 4)
        await read(backend, "a", 2, 2)
        await backend.head("a")
        assert await keys_of(backend, "") == ["a", "b"]
        await backend.delete("a")
        await backend.leftovers()
        await backend.remove_leftover(Leftover(name="x", key="", size_bytes=0, modified_seconds=0))
        return backend.counts

    counts = asyncio.run(check())
    assert counts.requests == {
        "put": 1,
        "put_if_absent": 1,
        "get": 1,
        "get_into": 2,
        "head": 1,
        "list": 1,
        "delete": 1,
        "leftovers": 1,
        "remove_leftover": 1,
    }
    assert counts.num_requests == 10
    assert (counts.up_bytes, counts.down_bytes, counts.retries) == (10, 13, 0)


def test_failed_requests_count_and_their_bytes_do_not():
    async def check():
        faulty = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        faulty.fail("put", StorageError("no"))
        backend = CountingBackend(faulty)
        with pytest.raises(StorageError):
            await backend.put("a", [b"12345"])
        with pytest.raises(ObjectNotFoundError):
            await backend.get("a")
        assert backend.counts == Counts(requests={"put": 1, "get": 1})

    asyncio.run(check())


def test_the_difference_is_what_happened_between():
    async def check():
        backend = CountingBackend(MemoryBackend(uuid.uuid4().hex))
        await backend.put("a", [b"1"])
        before = backend.counts
        await backend.put("b", [b"22"])
        await backend.get("b")
        assert backend.counts - before == Counts(requests={"put": 1, "get": 1}, up_bytes=2, down_bytes=2)
        assert before == Counts(requests={"put": 1}, up_bytes=1)

    asyncio.run(check())


def test_attempts_inside_and_retries_outside_of_a_retry_backend():
    async def check():
        counters = Counters()
        faulty = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        faulty.fail("put", StorageError("busy", retryable=True), times=2)
        inside = CountingBackend(faulty, counters)
        policy = RetryPolicy(first_delay_seconds=0)
        backend = CountingBackend(RetryBackend(inside, policy, on_retry=counters.add_retry))
        await backend.put("a", [b"123"])
        assert inside.counts == Counts(requests={"put": 3}, up_bytes=3, retries=2)
        assert backend.counts == Counts(requests={"put": 1}, up_bytes=3)

    asyncio.run(check())
