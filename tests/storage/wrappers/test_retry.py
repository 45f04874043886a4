import asyncio
import contextlib
import uuid
from collections import Counter
from dataclasses import replace

import pytest

from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)
from vescale_storage.testing import BackendConformance, keys_of, read
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy
from vescale_storage.wrappers.wrapper import WrapperBackend

NO_WAITING = RetryPolicy(max_attempts=3, first_delay_seconds=0, throttled_delay_seconds=0)
BUSY = StorageError("busy", retryable=True, key="k")
BROKEN = StorageError("broken", key="k")


def impatient(seconds):
    return RetryPolicy(max_attempts=2, first_delay_seconds=0, deadline_seconds=seconds, min_bytes_per_second=10**15)


class TestConformance(BackendConformance):
    def make(self):
        return RetryBackend(MemoryBackend(uuid.uuid4().hex), NO_WAITING)


class TestConformanceUnderFaults(BackendConformance):
    """Every other operation fails, and the suite does not notice."""

    def make(self):
        return RetryBackend(EveryOther(MemoryBackend(uuid.uuid4().hex)), replace(NO_WAITING, max_attempts=20))


class EveryOther(WrapperBackend):
    """Fails every other call of a verb on a key, now before it takes effect, now after."""

    def __init__(self, inner):
        super().__init__(inner)
        self.num_calls = Counter()

    @contextlib.contextmanager
    def stumbling(self, verb, key):
        number = self.num_calls[verb, key]
        self.num_calls[verb, key] += 1
        if number % 4 == 0:
            raise BUSY
        yield
        if number % 4 == 2:
            raise BUSY

    async def put(self, key, payload):
        with self.stumbling("put", key):
            await self.inner.put(key, payload)

    async def put_if_absent(self, key, payload):
        with self.stumbling("put_if_absent", key):
            await self.inner.put_if_absent(key, payload)

    async def get(self, key):
        with self.stumbling("get", key):
            return await self.inner.get(key)

    async def get_into(self, key, offset, out):
        with self.stumbling("get_into", key):
            await self.inner.get_into(key, offset, out)

    async def head(self, key):
        with self.stumbling("head", key):
            return await self.inner.head(key)

    async def list(self, prefix):
        with self.stumbling("list", prefix):
            async for info in self.inner.list(prefix):
                yield info

    async def delete(self, key):
        with self.stumbling("delete", key):
            await self.inner.delete(key)


class Stage:
    """A retry backend over a scripted one, which holds the object ``k``."""

    def __init__(self, policy=NO_WAITING):
        self.inner = MemoryBackend(uuid.uuid4().hex)
        self.faulty = FaultBackend(self.inner)
        self.counting = CountingBackend(self.faulty)
        self.backend = RetryBackend(self.counting, policy)

    @property
    def requests(self):
        return dict(self.counting.counts.requests)


@pytest.fixture
def stage():
    made = Stage()
    asyncio.run(made.inner.put("k", [b"12345"]))
    return made


def verbs(backend):
    return {
        "put": lambda: backend.put("k", [b"x"]),
        "put_if_absent": lambda: backend.put_if_absent("new", [b"x"]),
        "get": lambda: backend.get("k"),
        "get_into": lambda: read(backend, "k", 1, 2),
        "head": lambda: backend.head("k"),
        "list": lambda: keys_of(backend, ""),
        "delete": lambda: backend.delete("k"),
        "leftovers": backend.leftovers,
    }


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "get", "get_into", "head", "list", "delete", "leftovers"])
class TestEveryVerb:
    def test_is_tried_again(self, stage, verb):
        stage.faulty.fail(verb, BUSY, times=2)
        asyncio.run(verbs(stage.backend)[verb]())
        assert stage.requests == {verb: 3}

    def test_is_given_up(self, stage, verb):
        stage.faulty.fail(verb, BUSY, times=99)
        with pytest.raises(StorageError, match=r"busy \(gave up after 3 attempts") as caught:
            asyncio.run(verbs(stage.backend)[verb]())
        assert caught.value.__cause__ is BUSY
        assert caught.value.context == {"key": "k"}
        assert stage.requests[verb] == 3

    def test_is_not_tried_again_when_that_cannot_help(self, stage, verb):
        stage.faulty.fail(verb, BROKEN, times=99)
        with pytest.raises(StorageError) as caught:
            asyncio.run(verbs(stage.backend)[verb]())
        assert caught.value is BROKEN
        assert stage.requests == {verb: 1}

    def test_has_a_deadline(self, verb):
        stage = Stage(impatient(0.03))
        asyncio.run(stage.inner.put("k", [b"12345"]))
        stage.faulty.delay(verb, 5, times=99)
        with pytest.raises(StorageTimeoutError, match=r"no answer within 0\.03 s.*gave up after 2 attempts"):
            asyncio.run(asyncio.wait_for(verbs(stage.backend)[verb](), 2))

    def test_a_slow_answer_is_followed_by_another_attempt(self, verb):
        stage = Stage(impatient(0.05))
        asyncio.run(stage.inner.put("k", [b"12345"]))
        stage.faulty.delay(verb, 5, times=1)
        asyncio.run(asyncio.wait_for(verbs(stage.backend)[verb](), 2))


@pytest.mark.parametrize("error", [ThrottledError("slow", retryable=True), AccessDeniedError("no"), BUSY])
def test_the_last_error_keeps_its_class(stage, error):
    stage.faulty.fail("get", error, times=99)
    with pytest.raises(type(error)) as caught:
        asyncio.run(stage.backend.get("k"))
    assert type(caught.value) is type(error)
    assert caught.value.retryable is error.retryable


@pytest.mark.parametrize("error", [ObjectNotFoundError("gone"), CorruptionError("cut"), AlreadyExistsError("there")])
def test_answers_are_no_failures(stage, error):
    stage.faulty.fail("get", error)
    with pytest.raises(type(error)):
        asyncio.run(stage.backend.get("k"))
    assert stage.requests == {"get": 1}


# Creates


def test_a_conflict_at_the_first_attempt_is_believed(stage):
    with pytest.raises(AlreadyExistsError):
        asyncio.run(stage.backend.put_if_absent("k", [b"12345"]))
    assert stage.requests == {"put_if_absent": 1}


@pytest.mark.parametrize("content", [b"", b"mine", bytes(range(256)) * 90_000])
def test_a_create_whose_answer_was_lost_has_succeeded(stage, content):
    rule = stage.faulty.lose_answer("put_if_absent", BUSY)
    asyncio.run(stage.backend.put_if_absent("new", [content[:3], content[3:]]))
    assert rule.num_hit == 1
    assert asyncio.run(stage.inner.get("new")) == content


@pytest.mark.parametrize("content", [b"other", b"1234", b"123456", b""])
def test_another_writer_is_not_taken_for_a_lost_answer(stage, content):
    stage.faulty.fail("put_if_absent", BUSY)
    with pytest.raises(AlreadyExistsError):
        asyncio.run(stage.backend.put_if_absent("k", [content]))
    assert asyncio.run(stage.inner.get("k")) == b"12345"


def test_the_last_lost_answer_is_read_back_as_well(stage):
    stage.faulty.fail("put_if_absent", BUSY, times=2)
    stage.faulty.lose_answer("put_if_absent", BUSY, skip=2)
    asyncio.run(stage.backend.put_if_absent("new", [b"mine"]))
    assert asyncio.run(stage.inner.get("new")) == b"mine"


def test_a_failure_that_cannot_be_retried_after_a_lost_answer_is_read_back(stage):
    stage.faulty.lose_answer("put_if_absent", BUSY)
    stage.faulty.fail("put_if_absent", BROKEN, skip=1)
    asyncio.run(stage.backend.put_if_absent("new", [b"mine"]))


def test_without_proof_a_failure_stays_one(stage):
    stage.faulty.lose_answer("put_if_absent", BUSY, times=99)
    stage.faulty.fail("head", BROKEN, times=99)
    with pytest.raises(StorageError):
        asyncio.run(stage.backend.put_if_absent("new", [b"mine"]))


def test_a_failure_is_not_believed_to_have_made_what_another_did(stage):
    stage.faulty.fail("put_if_absent", BUSY, times=99)
    with pytest.raises(StorageError, match="gave up"):
        asyncio.run(stage.backend.put_if_absent("k", [b"other"]))
    with pytest.raises(StorageError, match="gave up"):
        asyncio.run(stage.backend.put_if_absent("absent", [b"other"]))


def test_an_object_deleted_while_it_is_read_back_proves_nothing(stage):
    class Vanishing(WrapperBackend):
        async def get_into(self, key, offset, out):
            await self.inner.delete(key)
            await self.inner.get_into(key, offset, out)

    stage.faulty.lose_answer("put_if_absent", BUSY)
    backend = RetryBackend(Vanishing(stage.faulty), NO_WAITING)
    with pytest.raises(AlreadyExistsError):
        asyncio.run(backend.put_if_absent("new", [b"mine"]))


# Listings


class Breaking(WrapperBackend):
    """Its listings break after ``good`` objects, ``times`` times."""

    def __init__(self, inner, *, good, times):
        super().__init__(inner)
        self.good, self.times, self.num_listings = good, times, 0

    async def list(self, prefix):
        self.num_listings += 1
        number = 0
        async for info in self.inner.list(prefix):
            if number == self.good and self.num_listings <= self.times:
                raise BUSY
            number += 1
            yield info


def listing_of_ten(good, times):
    async def make():
        inner = MemoryBackend(uuid.uuid4().hex)
        for number in range(10):
            await inner.put(f"k{number}", [b"x"])
        return Breaking(inner, good=good, times=times)

    return asyncio.run(make())


@pytest.mark.parametrize("good", [0, 1, 5, 9])
def test_a_broken_listing_goes_on_where_it_broke(good):
    breaking = listing_of_ten(good, times=2)
    backend = RetryBackend(breaking, NO_WAITING)
    assert asyncio.run(keys_of(backend, "k")) == [f"k{number}" for number in range(10)]
    assert breaking.num_listings == 3


def test_a_listing_that_breaks_at_the_same_place_again_and_again_is_given_up():
    breaking = listing_of_ten(5, times=99)
    with pytest.raises(StorageError, match="gave up after 3 attempts"):
        asyncio.run(keys_of(RetryBackend(breaking, NO_WAITING), "k"))
    assert breaking.num_listings == 3


# Policy


def test_pauses_double_up_to_the_maximum_and_are_spread():
    policy = RetryPolicy(first_delay_seconds=0.1, throttled_delay_seconds=1, max_delay_seconds=5)
    slow = ThrottledError("slow", retryable=True)
    assert [policy.delay(number, BUSY, 0.9999999999) for number in (1, 2, 3, 4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert [policy.delay(number, slow, 0.9999999999) for number in (1, 2, 3, 4)] == pytest.approx([1, 2, 4, 5])
    assert policy.delay(1, BUSY, 0) == pytest.approx(0.05)
    assert policy.delay(10_000, BUSY, 0) == pytest.approx(2.5)


def test_deadlines_grow_with_the_bytes():
    policy = RetryPolicy(deadline_seconds=10, min_bytes_per_second=100)
    assert policy.deadline(0) == 10
    assert policy.deadline(1000) == 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"first_delay_seconds": -1},
        {"throttled_delay_seconds": -1},
        {"max_delay_seconds": -1},
        {"deadline_seconds": 0},
        {"min_bytes_per_second": 0},
    ],
)
def test_impossible_policies(wrong):
    with pytest.raises(ConfigError):
        RetryPolicy(**wrong)


def test_one_attempt_means_no_retry(stage):
    stage.faulty.fail("get", BUSY, times=99)
    backend = RetryBackend(stage.counting, RetryPolicy(max_attempts=1))
    with pytest.raises(StorageError) as caught:
        asyncio.run(backend.get("k"))
    assert caught.value is BUSY
    assert stage.requests == {"get": 1}


def test_a_large_payload_has_the_time_it_needs():
    async def check():
        inner = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        inner.delay("put", 0.1, times=99)
        policy = RetryPolicy(max_attempts=1, deadline_seconds=0.02, min_bytes_per_second=1000)
        backend = RetryBackend(inner, policy)
        await backend.put("large", [bytes(1000)])
        with pytest.raises(StorageTimeoutError):
            await backend.put("small", [b"x"])

    asyncio.run(check())


def test_retries_are_logged_and_counted(stage, caplog):
    calls = []
    stage.faulty.fail("get", BUSY, times=2)
    backend = RetryBackend(stage.counting, NO_WAITING, on_retry=lambda: calls.append(1), chance=lambda: 0.5)
    asyncio.run(backend.get("k"))
    assert len(calls) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "attempt 1 of 3 to get 'k' failed; next in 0.00 s: busy",
        "attempt 2 of 3 to get 'k' failed; next in 0.00 s: busy",
    ]


def test_cancellation_is_no_failure(stage):
    async def check():
        stage.faulty.delay("get", 5)
        task = asyncio.create_task(stage.backend.get("k"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stage.requests == {"get": 1}

    asyncio.run(check())


def test_a_create_of_which_nothing_can_be_found_out_says_so():
    async def check():
        faults = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        faults.lose_answer("put_if_absent", BUSY, times=10)
        faults.fail("head", BROKEN, times=10)
        with pytest.raises(StorageError, match="may have been written all the same"):
            await RetryBackend(faults, replace(NO_WAITING, max_attempts=1)).put_if_absent("k", [b"x"])
        faults.rules.clear()
        faults.fail("put_if_absent", BUSY, times=10)
        with pytest.raises(StorageError, match="gave up after 3 attempts") as caught:
            await RetryBackend(faults, NO_WAITING).put_if_absent("l", [b"x"])
        assert "may have been written" not in caught.value.message  # it was looked for, and is not there

    asyncio.run(check())


def test_a_request_that_a_back_end_cannot_let_go_of_is_not_repeated():
    class Stuck(WrapperBackend):
        async def get_into(self, key, *_):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise StorageTimeoutError("stuck", key=key) from None

    async def check():
        with pytest.raises(StorageTimeoutError, match="stuck") as caught:
            await read(RetryBackend(Stuck(MemoryBackend("x")), impatient(0.01)), "k", 0, 1)
        assert not caught.value.retryable

    asyncio.run(check())
