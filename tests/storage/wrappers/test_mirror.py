import asyncio
import uuid

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import AccessDeniedError, CorruptionError, ObjectNotFoundError
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.testing import BackendConformance, keys_of, read, refused
from vescale_storage.wrappers.cache import CacheBackend
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.mirror import MirrorBackend
from vescale_storage.wrappers.retry import RetryBackend

PACK = pack_key("ab" * 32)
MANIFEST = manifest_key("cd" * 32)
CONTENT = bytes(range(256)) * 40


def memory():
    return MemoryBackend(uuid.uuid4().hex)


class TestConformance(BackendConformance):
    """A mirror that holds nothing changes nothing."""

    def make(self):
        return MirrorBackend(memory(), memory())


@pytest.fixture
def places():
    """Two equal copies and the two together."""
    first, second = CountingBackend(memory()), CountingBackend(memory())
    for copy in (first, second):
        for key in (PACK, MANIFEST, "refs/run/x", "store.json"):
            asyncio.run(copy.put(key, [CONTENT]))
    return first, second, MirrorBackend(first, second)


def test_while_the_first_copy_is_well_the_second_is_not_asked(places):
    first, second, both = places
    before = second.counts

    async def check():
        assert await read(both, PACK, 5, 100) == CONTENT[5:105]
        assert await both.get(MANIFEST) == CONTENT
        await both.put("k", [b"x"])
        await both.put_if_absent("l", [b"x"])
        await both.delete("k")
        assert await keys_of(both, "") == await keys_of(first, "")

    asyncio.run(check())
    assert (second.counts - before).num_requests == 0
    assert both.num_helped == 0


@pytest.mark.parametrize("loss", ["missing", "short"])
def test_what_is_missing_or_short_comes_from_the_second_copy(places, loss, caplog):
    first, second, both = places

    async def check():
        for key in (PACK, MANIFEST):
            await first.delete(key)
            if loss == "short":
                await first.put(key, [CONTENT[:50]])
        for _ in range(2):
            assert await read(both, PACK, 5, 100) == CONTENT[5:105]
        assert await read(both, MANIFEST, 5, 100) == CONTENT[5:105]
        if loss == "missing":
            assert await both.get(MANIFEST) == CONTENT
        first_keys = await keys_of(first, "packs/")
        assert first_keys == ([PACK] if loss == "short" else []), "nothing is repaired in silence"

    asyncio.run(check())
    assert both.num_helped == (4 if loss == "missing" else 3)
    assert [record.message.count(second.url) for record in caplog.records] == [1, 1], "one warning an object"


def test_what_changes_never_comes_from_the_second_copy(places):
    first, _, both = places

    async def check():
        for key in ("refs/run/x", "store.json"):
            await first.delete(key)
            await refused(ObjectNotFoundError, both.get(key))
            await refused(ObjectNotFoundError, read(both, key, 0, 1))
        await first.delete(PACK)
        await refused(ObjectNotFoundError, both.head(PACK))

    asyncio.run(check())
    assert both.num_helped == 0


def test_where_neither_has_it_the_error_is_that_of_the_first_and_tells_of_both(places):
    first, second, both = places

    async def check():
        await first.delete(PACK)
        await second.put(PACK, [b"short"])
        error = await refused(ObjectNotFoundError, read(both, PACK, 5, 100))
        assert first.url in error.message
        assert second.url in error.message
        assert error.context["key"] == PACK
        await first.put(PACK, [b"short"])
        await second.delete(PACK)
        await refused(CorruptionError, read(both, PACK, 5, 100))

    asyncio.run(check())


def test_a_second_copy_that_cannot_be_reached_is_told_of(places):
    first, second, _ = places
    faults = FaultBackend(second)
    faults.fail(None, AccessDeniedError("the mirror says no"), times=10)

    async def check():
        await first.delete(PACK)
        error = await refused(ObjectNotFoundError, MirrorBackend(first, faults).get(PACK))
        assert "the mirror says no" in error.message

    asyncio.run(check())


def test_a_failing_first_copy_is_not_hidden(places):
    """Only loss is healed: an outage or a refusal is for the caller to know."""
    first, second, _ = places
    faults = FaultBackend(first)
    faults.fail("get_into", AccessDeniedError("no"))
    asyncio.run(refused(AccessDeniedError, read(MirrorBackend(faults, second), PACK, 0, 5)))


def test_copies_are_both_places_past_every_cache_and_both_forget(places, tmp_path):
    first, second, _ = places
    outer, inner = RetryBackend(first), RetryBackend(second)

    async def check():
        cached = CacheBackend(inner, tmp_path / "second", 2**30)
        whole = CacheBackend(MirrorBackend(outer, cached), tmp_path / "both", 2**30)
        assert list(whole.copies()) == [outer, inner]
        await cached.get(PACK)
        await whole.get(PACK)
        await whole.forget(PACK)
        for copy in (first, second):
            await copy.put(PACK, [b"new"])
        assert await whole.get(PACK) == await cached.get(PACK) == b"new"

    asyncio.run(check())


def test_both_are_closed(places):
    closed = []

    class Closing(MemoryBackend):
        async def close(self):
            closed.append(self.url)
            raise AccessDeniedError("no")

    both = MirrorBackend(Closing("one"), Closing("two"))
    asyncio.run(refused(AccessDeniedError, both.close()))
    assert closed == ["memory://one", "memory://two"]
