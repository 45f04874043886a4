"""What a storage really does, tried out: whether it keeps the promises that a store is built on, and how fast it is.

It puts some small objects and one larger one under ``probe/`` in the store, and takes them away again.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vescale_ckpt.diagnosis.checks import Check, Latency, Level
from vescale_ckpt.errors import AlreadyExistsError, CorruptionError, ObjectNotFoundError
from vescale_storage import loop
from vescale_storage.backends.probe import PROBE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from vescale_storage.backend import Backend

T = TypeVar("T")

RACERS: Final = 8
NUM_SAMPLES: Final = 12
SMALL_BYTES: Final = 1 << 10
LARGE_BYTES: Final = 8 << 20
_MOST_CLOCK_SECONDS: Final = 60.0


def try_storage(backend: Backend) -> tuple[list[Check], list[Latency]]:
    """Return what the storage keeps of its promises, and how long its requests take.

    Raises:
        StorageError: it cannot be written to, or fails.
    """
    return loop.run(_Trial(backend).run())


class _Trial:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._prefix = f"{PROBE_PREFIX}{uuid.uuid4().hex}/"

    async def run(self) -> tuple[list[Check], list[Latency]]:
        try:
            checks = [
                await self._creates_once(),
                await self._creates_once_in_a_race(),
                await self._reads_what_it_wrote(),
                await self._lists_at_once(),
                await self._reads_ranges(),
                await self._deletes(),
                await self._clock(),
            ]
            return checks, await self._latencies()
        finally:
            async for info in self._backend.list(self._prefix):
                await self._backend.delete(info.key)

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    async def _creates_once(self) -> Check:
        name = "create-only put"
        if not self._backend.capabilities.conditional_put:
            return Check(name, Level.BAD, "the storage has none: never let more than one process save here at a time")
        key = self._key("once")
        await self._backend.put_if_absent(key, [b"first"])
        try:
            await self._backend.put_if_absent(key, [b"second"])
        except AlreadyExistsError:
            there = await self._backend.get(key)
            fits = there == b"first"
            return Check(name, Level.OK if fits else Level.BAD, "refused" if fits else f"refused, and wrote {there!r}")
        return Check(name, Level.BAD, "a second one is taken: two savers of a step could replace each other's ref")

    async def _creates_once_in_a_race(self) -> Check:
        name = f"create-only put, {RACERS} at once"
        if not self._backend.capabilities.conditional_put:
            return Check(name, Level.BAD, "the storage has none")
        key = self._key("race")
        bodies = [f"racer {number}".encode() for number in range(RACERS)]
        won = await asyncio.gather(*(_wins(self._backend.put_if_absent(key, [body])) for body in bodies))
        winners = [body for body, has_won in zip(bodies, won, strict=True) if has_won]
        there = await self._backend.get(key)
        if len(winners) == 1 and there == winners[0]:
            return Check(name, Level.OK, "one won, and its bytes are there")
        return Check(name, Level.BAD, f"{len(winners)} were told that they won, {there!r} is there")

    async def _reads_what_it_wrote(self) -> Check:
        name = "read after write"
        key = self._key("replaced")
        for number in range(4):
            body = f"version {number}".encode() * (number + 1)
            await self._backend.put(key, [body])
            if await self._backend.get(key) != body or (await self._backend.head(key)).size_bytes != len(body):
                return Check(name, Level.BAD, "an older object came back: a store needs strong consistency")
        return Check(name, Level.OK, "the newest bytes and size come back at once")

    async def _lists_at_once(self) -> Check:
        name = "list after write"
        keys = [self._key(f"list/{number:02d}") for number in range(10)]
        for key in reversed(keys):
            await self._backend.put(key, [b"x"])
        listed = [info.key async for info in self._backend.list(self._key("list/"))]
        if listed != keys:
            what = "not in order" if sorted(listed) == keys else f"{len(listed)} of {len(keys)} objects"
            return Check(name, Level.BAD, f"it shows {what}: readers may see older snapshots, and saves time out")
        for key in keys[::2]:
            await self._backend.delete(key)
        listed = [info.key async for info in self._backend.list(self._key("list/"))]
        if listed != keys[1::2]:
            return Check(name, Level.BAD, "what was deleted is still shown: collections may stop at it")
        return Check(name, Level.OK, "shows what was put and not what was deleted, in order, at once")

    async def _reads_ranges(self) -> Check:
        name = "ranges"
        key, body = self._key("range"), os.urandom(5000)
        await self._backend.put(key, [body])
        part = bytearray(1234)
        await self._backend.get_into(key, 567, memoryview(part))
        if part != body[567 : 567 + 1234]:
            return Check(name, Level.BAD, "a range came back with other bytes")
        try:
            await self._backend.get_into(key, 4000, memoryview(bytearray(1001)))
        except CorruptionError:
            return Check(name, Level.OK, "exact, and one past the end is refused")
        return Check(name, Level.BAD, "a range past the end is served: cut objects would go unnoticed")

    async def _deletes(self) -> Check:
        name = "delete"
        key = self._key("deleted")
        await self._backend.put(key, [b"x"])
        await self._backend.delete(key)
        await self._backend.delete(key)  # of nothing: no error
        try:
            await self._backend.head(key)
        except ObjectNotFoundError:
            return Check(name, Level.OK, "gone at once; deleting nothing is no error")
        return Check(name, Level.BAD, "an object that was deleted is still there")

    async def _clock(self) -> Check:
        key = self._key("clock")
        before = time.time()
        await self._backend.put(key, [b"x"])
        apart = (await self._backend.head(key)).modified_seconds - before
        level = Level.NOTE if abs(apart) > _MOST_CLOCK_SECONDS else Level.OK
        # S3 and others date objects to the second, rounded down.
        return Check("clock", level, f"{abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} this machine's")

    async def _latencies(self) -> list[Latency]:
        small, large = os.urandom(SMALL_BYTES), os.urandom(LARGE_BYTES)
        key, big = self._key("small"), self._key("large")
        backend = self._backend

        async def listed() -> None:
            async for _ in backend.list(self._prefix):
                pass

        into = memoryview(bytearray(LARGE_BYTES))
        return [
            await _timed("put", lambda: backend.put(key, [small]), SMALL_BYTES),
            await _timed("get", lambda: backend.get(key), SMALL_BYTES),
            await _timed("head", lambda: backend.head(key), 0),
            await _timed("list", listed, 0),
            await _timed("put large", lambda: backend.put(big, [large]), LARGE_BYTES, 3),
            await _timed("get large", lambda: backend.get_into(big, 0, into), LARGE_BYTES, 3),
            await _timed("delete", lambda: backend.delete(key), 0, 1),
        ]


async def _wins(put: Coroutine[Any, Any, None]) -> bool:
    try:
        await put
    except AlreadyExistsError:
        return False
    return True


async def _timed(verb: str, call: Callable[[], Awaitable[object]], num_bytes: int, num: int = NUM_SAMPLES) -> Latency:
    seconds = []
    for _ in range(num):
        began = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began)
    return Latency(verb, tuple(sorted(seconds)), num_bytes)
