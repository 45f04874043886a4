import asyncio
import time
import uuid

import pytest

from vescale_storage.backend import Leftover
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import AlreadyExistsError, ObjectNotFoundError, StorageError, VeScaleError
from vescale_storage.testing import BackendConformance, keys_of, read
from vescale_storage.wrappers.faults import FaultBackend, Operation, Rule, SimulatedCrash, When


class TestConformance(BackendConformance):
    def make(self):
        return FaultBackend(MemoryBackend(uuid.uuid4().hex))


@pytest.fixture
def inner():
    return MemoryBackend(uuid.uuid4().hex)


async def every_verb(backend):
    await backend.put("a", [b"1"])
    await backend.put_if_absent("b", [b"2"])
    await backend.get("a")
    await read(backend, "a", 0, 1)
    await backend.head("a")
    await keys_of(backend, "")
    await backend.leftovers()
    await backend.remove_leftover(Leftover(name="x", key="c", size_bytes=0, modified_seconds=0))
    await backend.delete("a")


def test_every_operation_has_a_number(inner):
    backend = FaultBackend(inner)
    asyncio.run(every_verb(backend))
    assert backend.operations == [
        (0, "put", "a"),
        (1, "put_if_absent", "b"),
        (2, "get", "a"),
        (3, "get_into", "a"),
        (4, "head", "a"),
        (5, "list", ""),
        (6, "leftovers", ""),
        (7, "remove_leftover", "c"),
        (8, "delete", "a"),
    ]
    assert isinstance(backend.operations[0], Operation)


@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("number", range(9))
def test_dying_at_each_operation(when, number):
    inner = MemoryBackend(uuid.uuid4().hex)
    backend = FaultBackend(inner, kill_at=number, kill_when=when)

    async def check():
        with pytest.raises(SimulatedCrash):
            await every_verb(backend)
        assert backend.dead
        assert len(backend.operations) == number + (when is When.AFTER)
        happened = number + (when is When.AFTER)
        wanted = ["a", "b"][: min(happened, 2)] if happened < 9 else ["b"]
        assert await keys_of(inner, "") == wanted
        for attempt in (backend.get("a"), backend.put("z", [b""]), keys_of(backend, ""), backend.delete("a")):
            with pytest.raises(SimulatedCrash, match="dead"):
                await attempt
        assert await keys_of(inner, "") == wanted

    asyncio.run(check())


def test_a_crash_is_no_error_of_the_package_but_an_exception():
    assert issubclass(SimulatedCrash, Exception)
    assert not issubclass(SimulatedCrash, VeScaleError)


def test_dying_at_an_operation_that_fails_is_dying(inner):
    backend = FaultBackend(inner, kill_at=0, kill_when=When.AFTER)
    with pytest.raises(SimulatedCrash):
        asyncio.run(backend.get("absent"))
    assert backend.dead


def test_operations_under_way_at_the_death_are_not_answered(inner):
    async def check():
        backend = FaultBackend(inner, kill_at=1)
        backend.delay("put", 0.02)
        slow = asyncio.create_task(backend.put("slow", [b"x"]))
        await asyncio.sleep(0.001)
        with pytest.raises(SimulatedCrash):
            await backend.put("fatal", [b"x"])
        with pytest.raises(SimulatedCrash):
            await slow

    asyncio.run(check())


def test_rules_choose_by_verb_prefix_and_number(inner):
    async def check():
        backend = FaultBackend(inner)
        rule = backend.fail("put", StorageError("no"), prefix="packs/", skip=1, times=2)
        outcomes = []
        for key in ("refs/a", "packs/a", "packs/b", "packs/c", "packs/d"):
            try:
                await backend.put(key, [b"x"])
                outcomes.append("done")
            except StorageError:
                outcomes.append("failed")
        assert outcomes == ["done", "done", "failed", "failed", "done"]
        assert rule.num_hit == 2
        await backend.put_if_absent("packs/b", [b"x"])
        assert await keys_of(inner, "packs/") == ["packs/a", "packs/b", "packs/d"]

    asyncio.run(check())


def test_a_rule_without_verb_is_for_all(inner):
    backend = FaultBackend(inner)
    rule = backend.fail(None, StorageError("no"), times=3)
    for attempt in (backend.put("a", [b"x"]), backend.get("a"), backend.delete("a")):
        with pytest.raises(StorageError):
            asyncio.run(attempt)
    asyncio.run(backend.put("a", [b"x"]))
    assert rule.num_hit == 3


def test_a_lost_answer(inner):
    async def check():
        backend = FaultBackend(inner)
        backend.lose_answer("put_if_absent", StorageError("lost", retryable=True))
        with pytest.raises(StorageError, match="lost"):
            await backend.put_if_absent("k", [b"mine"])
        assert await inner.get("k") == b"mine"
        with pytest.raises(AlreadyExistsError):
            await backend.put_if_absent("k", [b"mine"])

    asyncio.run(check())


def test_a_delay(inner):
    async def check():
        backend = FaultBackend(inner)
        backend.delay("put", 0.05)
        began = time.monotonic()
        await backend.put("k", [b"x"])
        assert time.monotonic() - began >= 0.045
        assert await backend.get("k") == b"x"

    asyncio.run(check())


def test_lies(inner):
    async def check():
        await inner.put("k", [b"\x00\x01\x02\x03"])
        backend = FaultBackend(inner)
        backend.truncate("get", 3)
        backend.corrupt("get", 2, skip=1)
        backend.truncate("get_into", 2)
        backend.corrupt("get_into", -1, skip=1)
        assert await backend.get("k") == b"\x00"
        assert await backend.get("k") == b"\x00\x01\xfd\x03"
        assert await backend.get("k") == b"\x00\x01\x02\x03"
        out = bytearray(b"\xee" * 4)
        await backend.get_into("k", 0, memoryview(out))
        assert out == b"\x00\x01\xee\xee"
        assert await read(backend, "k", 0, 4) == b"\x00\x01\x02\xfc"
        assert await read(backend, "k", 0, 4) == b"\x00\x01\x02\x03"

    asyncio.run(check())


def test_a_listing_that_leaves_out_the_last(inner):
    async def check():
        for key in "abc":
            await inner.put(key, [b"x"])
        backend = FaultBackend(inner)
        backend.truncate("list", 2)
        assert await keys_of(backend, "") == ["a"]
        assert await keys_of(backend, "") == ["a", "b", "c"]

    asyncio.run(check())


def test_errors_of_the_inner_one_pass(inner):
    backend = FaultBackend(inner)
    with pytest.raises(ObjectNotFoundError):
        asyncio.run(backend.get("absent"))
    assert not backend.dead


def test_rules_may_be_made_by_hand(inner):
    backend = FaultBackend(inner)
    rule = backend.add(Rule(verb="put", error=StorageError("x"), when=When.AFTER, times=10**9))
    for _ in range(3):
        with pytest.raises(StorageError):
            asyncio.run(backend.put("k", [b"x"]))
    assert (rule.num_seen, rule.num_hit) == (3, 3)
