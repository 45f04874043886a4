"""The conformance suite: what every back end must do, as tests that any back end can be put through.

    class TestMine(BackendConformance):
        def make(self):
            return MyBackend(fresh_place())

A test runner that collects ``test_`` methods of classes runs it; pytest is not needed to import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from vescale_storage.backend import Backend
from vescale_storage.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
)
from vescale_storage.testing_support import equal, fork_and_wait, keys_of, pattern, read, refused, true

__all__ = ["BackendConformance", "equal", "keys_of", "on_fresh_backend", "read", "refused", "true"]

Check = Callable[["BackendConformance", Backend], Awaitable[None]]

_BAD_KEYS: Final = ("", "/a", "a/", "a//b", ".", "a/.", "../a", "a/../b", "a\nb", "a\x00b", "a" * 2000)
_ODD_KEYS: Final = (
    "runs/a%20b",
    "runs/%5Bx%5D",
    "runs/a%2Fb",
    "runs/a/b",
    "runs/%25",
    "runs/%2A%3F%23",
    "runs/A.b_c-d",
)
_RACERS: Final = 16


def on_fresh_backend(check: Check) -> Callable[[BackendConformance], None]:
    """Turn a coroutine over a back end into a test over ``self.make()``, on an event loop of its own."""

    def test(self: BackendConformance) -> None:
        async def run() -> None:
            backend = self.make()
            try:
                await check(self, backend)
            finally:
                await backend.close()

        asyncio.run(run())

    test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
    return test


class BackendConformance:
    """Subclass it and implement ``make``; every inherited ``test_`` method must pass."""

    many_keys = 1100
    """More than a page of any listing in use holds (1,000)."""
    num_races = 3
    large_bytes = 11 * 2**20 + 1
    """Enough that the back end cuts it, if it ever does: lower its threshold rather than raise this."""

    names_may_clash = True
    """Whether an object may have the name of a folder; False for file systems."""

    def make(self) -> Backend:
        """Return a back end at a place that holds no object yet."""
        raise NotImplementedError

    def make_again(self, backend: Backend) -> Backend | None:
        """Return another client of the same place that shares nothing else with this one, or None if it cannot be."""
        del backend
        return None

    # One object

    @on_fresh_backend
    async def test_put_joins_buffers_in_order(self, backend: Backend) -> None:
        """Buffers of every kind and size, also empty ones, make one object."""
        await backend.put("a/b", [b"one", b"", bytearray(b"-two-"), memoryview(b"xthreex")[1:6]])
        equal(await backend.get("a/b"), b"one-two-three", "content")
        equal((await backend.head("a/b")).size_bytes, 13, "size")

    @on_fresh_backend
    async def test_put_replaces(self, backend: Backend) -> None:
        """A second put leaves nothing of the first, whichever is longer."""
        for content in (b"first and long", b"2", b"third, longer than all before"):
            await backend.put("k", [content])
            equal(await backend.get("k"), content, "content")
            equal((await backend.head("k")).size_bytes, len(content), "size")

    @on_fresh_backend
    async def test_empty_object(self, backend: Backend) -> None:
        """An object may have no bytes, and is still there."""
        await backend.put("none", [])
        await backend.put_if_absent("also-none", [b"", b""])
        for key in ("none", "also-none"):
            equal(await backend.get(key), b"", "content")
            equal((await backend.head(key)).size_bytes, 0, "size")
            await backend.get_into(key, 0, memoryview(bytearray()))
        equal(await keys_of(backend, ""), ["also-none", "none"], "keys")
        await refused(AlreadyExistsError, backend.put_if_absent("none", [b"x"]))

    @on_fresh_backend
    async def test_keeps_no_reference_to_buffers(self, backend: Backend) -> None:
        """The caller may change its buffers as soon as a put has returned."""
        for num_bytes in (10, 300_000, 3 * 2**20, self.large_bytes):
            buffer = bytearray(pattern(num_bytes, seed=num_bytes))
            wanted = bytes(buffer)
            half = num_bytes // 2
            await backend.put("put", [memoryview(buffer)[:half], memoryview(buffer)[half:]])
            buffer[:] = b"\xee" * num_bytes
            equal(await backend.get("put"), wanted, f"content of {num_bytes} bytes after put")
            buffer[:] = wanted
            await backend.put_if_absent(f"create-{num_bytes}", [buffer])
            buffer[:] = b"\xee" * num_bytes
            equal(await backend.get(f"create-{num_bytes}"), wanted, f"content of {num_bytes} bytes after create")

    @on_fresh_backend
    async def test_large_object(self, backend: Backend) -> None:
        """An object that is cut on its way comes back whole, and can be read across the cuts."""
        wanted = pattern(self.large_bytes, seed=1)
        cuts = [0, 1, 5 * 2**20 - 3, 5 * 2**20 + 7, len(wanted)]
        await backend.put_if_absent(
            "large", [memoryview(wanted)[start:stop] for start, stop in itertools.pairwise(cuts)]
        )
        equal(await backend.get("large"), wanted, "content")
        equal((await backend.head("large")).size_bytes, len(wanted), "size")
        for offset, num_bytes in ((5 * 2**20 - 10, 20), (len(wanted) - 5, 5), (0, len(wanted))):
            equal(await read(backend, "large", offset, num_bytes), wanted[offset : offset + num_bytes], "range")
        await refused(AlreadyExistsError, backend.put_if_absent("large", [wanted[:-1], b"other"]))
        equal(list(await backend.leftovers()), [], "leftovers")

    @on_fresh_backend
    async def test_put_if_absent_refuses_and_changes_nothing(self, backend: Backend) -> None:
        """A create finds what a put or a create made before."""
        await backend.put("put", [b"old"])
        await backend.put_if_absent("created", [b"old"])
        for key in ("put", "created"):
            error = await refused(AlreadyExistsError, backend.put_if_absent(key, [b"new, longer"]))
            true(isinstance(error, FileExistsError), "the error is a FileExistsError, too")
            equal(error.context.get("key"), key, "key in the error's context")
            equal(await backend.get(key), b"old", "content")

    @on_fresh_backend
    async def test_one_of_many_racing_creates_wins(self, backend: Backend) -> None:
        """Exactly one of 16 succeeds, the others see a conflict, and the object is the winner's."""
        if not backend.capabilities.conditional_put:
            return
        for round_ in range(self.num_races):
            key = f"race-{round_}"
            outcomes = await asyncio.gather(
                *(backend.put_if_absent(key, [b"%d" % racer]) for racer in range(_RACERS)), return_exceptions=True
            )
            winners = [racer for racer, outcome in enumerate(outcomes) if outcome is None]
            kinds = {type(outcome) for outcome in outcomes if outcome is not None}
            equal(len(winners), 1, f"number of winners (the others: {kinds})")
            equal(kinds, {AlreadyExistsError}, "errors of the losers")
            equal(await backend.get(key), b"%d" % winners[0], "content")

    @on_fresh_backend
    async def test_missing_object(self, backend: Backend) -> None:
        """Reading what is not there is an error of its own, under a folder that is there as well."""
        await backend.put("folder/object", [b"x"])
        for key in ("absent", "folder/absent", "folder", "fold", "absent/folder/object"):
            for attempt in (
                partial(backend.get, key),
                partial(backend.head, key),
                partial(read, backend, key, 0, 1),
                partial(read, backend, key, 0, 0),
            ):
                error = await refused(ObjectNotFoundError, attempt())
                true(isinstance(error, FileNotFoundError), "the error is a FileNotFoundError, too")
                equal(error.context.get("key"), key, "key in the error's context")

    @on_fresh_backend
    async def test_head_tells_time(self, backend: Backend) -> None:
        """The time of an object is about now, and does not go back when it is put again."""
        await backend.put("k", [b"1"])
        first = (await backend.head("k")).modified_seconds
        true(abs(time.time() - first) < 300, "an object just put is at most 5 minutes old")
        await backend.put("k", [b"2"])
        true((await backend.head("k")).modified_seconds >= first, "a later put has no earlier time")

    # Ranges

    @on_fresh_backend
    async def test_ranges(self, backend: Backend) -> None:
        """Every range of a small object is exact and touches nothing beside its buffer."""
        wanted = bytes(range(10))
        await backend.put("k", [wanted])
        for offset in range(len(wanted) + 1):
            for num_bytes in range(len(wanted) - offset + 1):
                frame = bytearray(b"\xee" * (num_bytes + 4))
                await backend.get_into("k", offset, memoryview(frame)[2 : 2 + num_bytes])
                equal(bytes(frame), b"\xee\xee" + wanted[offset : offset + num_bytes] + b"\xee\xee", "frame")

    @on_fresh_backend
    async def test_ranges_past_the_end(self, backend: Backend) -> None:
        """A range that leaves the object says that something is damaged, never returns less."""
        await backend.put("k", [b"0123456789"])
        await backend.put("none", [])
        for key, offset, num_bytes in (
            ("k", 9, 2),
            ("k", 0, 11),
            ("k", 10, 1),
            ("k", 99, 5),
            ("k", 11, 0),
            ("none", 0, 1),
        ):
            error = await refused(CorruptionError, read(backend, key, offset, num_bytes))
            equal(error.context.get("key"), key, "key in the error's context")
        await refused(InvalidInputError, read(backend, "k", -1, 1))

    # Listing

    @on_fresh_backend
    async def test_list_is_by_string_prefix_in_order(self, backend: Backend) -> None:
        """A prefix is no folder, and the order is that of whole keys."""
        keys = ["a", "a-b/x", "a.b", "a0", "ab/c", "b/a/1", "b/a/10", "b/a/2", "b/a-", "b/aa", "c/0001.01", "c/0001.02"]
        if not self.names_may_clash:
            keys.remove("a")
        await asyncio.gather(*(backend.put(key, [key.encode()]) for key in random.sample(keys, len(keys))))
        for prefix in (
            "",
            "a",
            "a-",
            "ab",
            "b",
            "b/",
            "b/a",
            "b/a/",
            "b/a/1",
            "c/0001.",
            "c/0001.02",
            "d",
            "b/a/1/",
            "a/",
        ):
            wanted = sorted(key for key in keys if key.startswith(prefix))
            equal(await keys_of(backend, prefix), wanted, f"keys under {prefix!r}")
        sizes = {info.key: info.size_bytes async for info in backend.list("")}
        equal(sizes, {key: len(key) for key in keys}, "sizes")
        await refused(InvalidInputError, keys_of(backend, "../"))

    @on_fresh_backend
    async def test_list_of_many(self, backend: Backend) -> None:
        """A listing is whole however many pages it takes."""
        keys = [f"many/{number:05}" for number in range(self.many_keys)]
        bound = asyncio.Semaphore(32)

        async def put(key: str) -> None:
            async with bound:
                await backend.put(key, [b"x"])

        await asyncio.gather(*(put(key) for key in reversed(keys)))
        equal(await keys_of(backend, "many/"), keys, "keys")
        equal(await keys_of(backend, "many/0000"), keys[:10], "keys of a narrower prefix")

    @on_fresh_backend
    async def test_another_client_is_seen_at_once(self, backend: Backend) -> None:
        """Nothing is cached: what another client has put, changed or deleted is so here."""
        other = self.make_again(backend)
        if other is None:
            return
        try:
            equal(await keys_of(backend, "shared/"), [], "keys before")
            await other.put("shared/a", [b"1"])
            await other.put("shared/b", [b"1"])
            equal(await keys_of(backend, "shared/"), ["shared/a", "shared/b"], "keys after a put elsewhere")
            equal((await backend.head("shared/a")).size_bytes, 1, "size")
            await other.put("shared/a", [b"longer than before"])
            await other.delete("shared/b")
            equal((await backend.head("shared/a")).size_bytes, 18, "size after a change elsewhere")
            equal(await backend.get("shared/a"), b"longer than before", "content after a change elsewhere")
            equal(await read(backend, "shared/a", 7, 11), b"than before", "range after a change elsewhere")
            equal(await keys_of(backend, "shared/"), ["shared/a"], "keys after a deletion elsewhere")
            await refused(ObjectNotFoundError, backend.get("shared/b"))
            await refused(AlreadyExistsError, backend.put_if_absent("shared/a", [b"x"]))
            await backend.put_if_absent("shared/b", [b"x"])
        finally:
            await other.close()

    # Keys

    @on_fresh_backend
    async def test_odd_names_stay_as_they_are(self, backend: Backend) -> None:
        """Percent signs are part of a key: no layer decodes them, and no name is a pattern."""
        for key in _ODD_KEYS:
            await backend.put_if_absent(key, [key.encode()])
        equal(await keys_of(backend, "runs/"), sorted(_ODD_KEYS), "keys")
        for key in _ODD_KEYS:
            equal(await backend.get(key), key.encode(), f"content of {key!r}")
            equal(await keys_of(backend, key), [key], f"keys under {key!r}")
        await backend.delete("runs/a%2Fb")
        equal(await backend.get("runs/a/b"), b"runs/a/b", "content of its neighbour after a deletion")

    @on_fresh_backend
    async def test_bad_keys_are_refused(self, backend: Backend) -> None:
        """No key leaves the root, and none is silently taken for another."""
        await backend.put("a", [b"x"])
        for key in _BAD_KEYS:
            for attempt in (
                partial(backend.put, key, [b"x"]),
                partial(backend.put_if_absent, key, [b"x"]),
                partial(backend.get, key),
                partial(read, backend, key, 0, 1),
                partial(backend.head, key),
                partial(backend.delete, key),
            ):
                await refused(InvalidInputError, attempt())
        equal(await keys_of(backend, ""), ["a"], "keys")

    @on_fresh_backend
    async def test_delete(self, backend: Backend) -> None:
        """A deletion takes one object, may be repeated, and frees the key."""
        for key in ("d/a", "d/a-b", "d/b/c"):
            await backend.put(key, [b"old"])
        for _ in range(2):
            await backend.delete("d/a")
            await backend.delete("never/there")
        await refused(ObjectNotFoundError, backend.get("d/a"))
        equal(await keys_of(backend, "d/"), ["d/a-b", "d/b/c"], "keys")
        await backend.delete("d/b/c")
        await backend.put_if_absent("d/a", [b"new"])
        await backend.put_if_absent("d/b/c", [b"new"])
        equal(await backend.get("d/a") + await backend.get("d/b/c"), b"newnew", "content")

    # Concurrency

    @on_fresh_backend
    async def test_reads_are_never_torn(self, backend: Backend) -> None:
        """While an object is replaced again and again, every get returns one of its contents, whole."""
        contents = [bytes([number]) * (100_000 + 50_000 * number) for number in range(4)]
        await backend.put("k", [contents[0]])
        writing = True

        async def write() -> None:
            nonlocal writing
            for number in range(12):
                content = contents[number % len(contents)]
                await backend.put("k", [content[:70_000], content[70_000:]])
            writing = False

        async def watch() -> None:
            while writing:
                found = await backend.get("k")
                true(found in contents, f"a get returned {len(found)} bytes that were never put together")
                await asyncio.sleep(0)

        await asyncio.gather(write(), watch(), watch())

    @on_fresh_backend
    async def test_folders_come_and_go(self, backend: Backend) -> None:
        """Puts and deletions beside each other in one folder do not get into each other's way."""

        async def churn(name: str) -> None:
            for _ in range(10):
                await backend.put(f"txn/{name}/object", [b"x"])
                await backend.put_if_absent(f"txn/shared/{name}", [b"x"])
                await backend.delete(f"txn/{name}/object")
                await backend.delete(f"txn/shared/{name}")

        await asyncio.gather(*(churn(str(number)) for number in range(6)))
        equal(await keys_of(backend, ""), [], "keys")

    @on_fresh_backend
    async def test_cancelled_get_lets_go_of_the_buffer(self, backend: Backend) -> None:
        """After a cancelled read has ended, nothing writes into its buffer."""
        await backend.put("k", [pattern(self.large_bytes, seed=2)])
        out = bytearray(self.large_bytes)
        for delay_seconds in (0.0, 0.0005, 0.005):
            task = asyncio.ensure_future(backend.get_into("k", 0, memoryview(out)))
            await asyncio.sleep(delay_seconds)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            out[:] = b"\xee" * len(out)
            await asyncio.sleep(0.02)
            equal(out.count(0xEE), len(out), "bytes of the buffer that are as the caller left them")

    @on_fresh_backend
    async def test_cancelled_put_is_whole_or_absent(self, backend: Backend) -> None:
        """A put that was cut short leaves the old object or the new one, and the key usable."""
        old, new = b"old", pattern(self.large_bytes, seed=3)
        await backend.put("k", [old])
        for delay_seconds in (0.0, 0.001, 0.01):
            task = asyncio.ensure_future(backend.put("k", [new]))
            await asyncio.sleep(delay_seconds)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            true(await backend.get("k") in {old, new}, "the object is one of those put")
        await backend.put("k", [old])
        equal(await backend.get("k"), old, "content")

    def test_event_loops_one_after_another(self) -> None:
        """One back end serves several event loops, as it does in a test run or after a fork."""
        backend = self.make()

        async def use(number: int) -> None:
            try:
                await backend.put(f"loop-{number}", [b"x"])
                equal(await keys_of(backend, "loop-"), [f"loop-{before}" for before in range(number + 1)], "keys")
            finally:
                await backend.close()

        for number in range(3):
            asyncio.run(use(number))

    def test_fork(self) -> None:
        """A back end in use by the parent works in a forked child, and goes on to work in the parent."""
        if not hasattr(os, "fork"):
            return
        backend = self.make()

        async def parent() -> None:
            try:
                await backend.put("from-parent", [b"parent"])
                exit_code = await asyncio.to_thread(fork_and_wait, child)
                equal(exit_code, 0, "exit code of the child")
                equal(await backend.get("from-parent"), b"parent", "content that the parent sees")
                if backend.capabilities.shared:
                    equal(await backend.get("from-child"), b"child", "what the child has put")
            finally:
                await backend.close()

        async def child() -> None:
            equal(await backend.get("from-parent"), b"parent", "content that the child sees")
            await backend.put_if_absent("from-child", [b"child"])
            equal(await keys_of(backend, "from-"), ["from-child", "from-parent"], "keys that the child sees")
            await backend.close()

        asyncio.run(parent())

    @on_fresh_backend
    async def test_close_twice(self, backend: Backend) -> None:
        """Closing is idempotent."""
        await backend.put("k", [b"x"])
        await backend.close()
        await backend.close()

    @on_fresh_backend
    async def test_capabilities(self, backend: Backend) -> None:
        """The record is filled with numbers that a planner can use."""
        capabilities = backend.capabilities
        true(min(capabilities.put_concurrency, capabilities.get_concurrency) >= 1, "concurrency is at least 1")
        true(capabilities.max_object_bytes >= 2**32, "an object may have 4 GiB")
        true(bool(backend.url), "the back end says where it is")
