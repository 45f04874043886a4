from __future__ import annotations

import asyncio
import itertools

import pytest

from vescale_storage.deadline import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, Deadline
from vescale_storage.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)


class FakeLoop:
    """A clock that only sleeping moves."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.pauses = []
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    def time(self):
        return self.now

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def drive(coro):
    with pytest.raises(StopIteration) as stop:
        coro.send(None)
    return stop.value.value


def test_pauses_grow_with_the_wait_from_2_to_250_ms_and_end_at_the_deadline(monkeypatch):
    clock = FakeLoop(monkeypatch)
    deadline = Deadline(30)
    while drive(deadline.pause()):
        pass
    assert clock.pauses[0] == MIN_PAUSE_SECONDS == 0.002
    assert max(clock.pauses) == MAX_PAUSE_SECONDS == 0.25
    assert clock.now == pytest.approx(130)
    assert all(later >= earlier for earlier, later in itertools.pairwise(clock.pauses[:-1]))
    # Polling adds at most an eighth to a wait, and costs about four requests a second in the end.
    waited = 0.0
    for pause in clock.pauses:
        assert pause <= max(MIN_PAUSE_SECONDS, waited / 8 + 1e-9)
        waited += pause
    assert len(clock.pauses) < 190


def test_the_longest_pause_can_be_raised(monkeypatch):
    clock = FakeLoop(monkeypatch)
    deadline = Deadline(100, max_pause_seconds=5)
    while drive(deadline.pause()):
        pass
    assert max(clock.pauses) == 5


def test_after_the_deadline_there_is_no_pause():
    async def main():
        deadline = Deadline(0)
        assert deadline.remaining_seconds() == 0
        assert not await deadline.pause()

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [StorageError("later", retryable=True), ThrottledError("slow", retryable=True), StorageTimeoutError("slow")],
)
def test_storage_that_asks_to_try_later_is_waited_out_and_remembered(error):
    async def stumble():
        raise error

    async def main():
        deadline = Deadline(10)
        assert await deadline.attempt(stumble) is None
        assert deadline.last_error is error

    asyncio.run(main())


@pytest.mark.parametrize("error", [AccessDeniedError("no"), StorageError("broken"), ObjectNotFoundError("none")])
def test_errors_that_time_does_not_heal_pass_through(error):
    async def stumble():
        raise error

    async def main():
        with pytest.raises(type(error)):
            await Deadline(10).attempt(stumble)

    asyncio.run(main())


def test_an_action_that_hangs_is_ended_by_the_deadline():
    async def main():
        deadline = Deadline(0.05)
        assert await asyncio.wait_for(deadline.attempt(lambda: asyncio.sleep(60, "slept")), 5) is None
        assert isinstance(deadline.last_error, TimeoutError)
        assert deadline.elapsed_seconds() >= 0.04
        assert await Deadline(5).attempt(lambda: asyncio.sleep(0, "slept")) == "slept"

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_nonsense_is_refused(seconds):
    async def main():
        with pytest.raises(ConfigError):
            Deadline(seconds)

    asyncio.run(main())
