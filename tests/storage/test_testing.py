"""The conformance suite finds what it is there to find: each of these back ends breaks one promise."""

import asyncio
import urllib.parse
import uuid

import pytest

from vescale_storage.backend import Backend
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.errors import AlreadyExistsError, InvalidInputError, ObjectNotFoundError, VeScaleError
from vescale_storage.testing import BackendConformance
from vescale_storage.wrappers.wrapper import WrapperBackend


class KeepsBuffers(WrapperBackend):
    kept = None

    async def put(self, key, payload):
        self.kept = (key, payload)

    async def get(self, key):
        return b"".join(self.kept[1]) if key == self.kept[0] else b""


class JoinsBackwards(WrapperBackend):
    async def put(self, key, payload):
        await self.inner.put(key, list(reversed(payload)))


class Appends(WrapperBackend):
    async def put(self, key, payload):
        try:
            old = await self.inner.get(key)
        except ObjectNotFoundError:
            old = b""
        content = b"".join(payload)
        await self.inner.put(key, [content, old[len(content) :]])


class LosesEmptyObjects(WrapperBackend):
    async def put(self, key, payload):
        if any(payload):
            await self.inner.put(key, payload)


class CreatesOver(WrapperBackend):
    async def put_if_absent(self, key, payload):
        await self.inner.put(key, payload)


class LooksThenWrites(WrapperBackend):
    async def put_if_absent(self, key, payload):
        try:
            await self.inner.head(key)
        except ObjectNotFoundError:
            await asyncio.sleep(0)
            await self.inner.put(key, payload)
        else:
            raise AlreadyExistsError("there", key=key)


class ReturnsLess(WrapperBackend):
    async def get_into(self, key, offset, out):
        content = await self.inner.get(key)
        found = content[offset : offset + len(out)]
        out[: len(found)] = found


class OffByOne(WrapperBackend):
    async def get_into(self, key, offset, out):
        content = (await self.inner.get(key)) + b"x"
        if offset + len(out) >= len(content):
            await self.inner.get_into(key, offset, out)
        out[:] = content[offset + 1 : offset + 1 + len(out)]


class InventsZeros(WrapperBackend):
    async def get_into(self, key, offset, out):
        try:
            await self.inner.get_into(key, offset, out)
        except ObjectNotFoundError:
            out[:] = bytes(len(out))


class ListsFolders(WrapperBackend):
    async def list(self, prefix):
        folder = prefix.rpartition("/")[0]
        async for info in self.inner.list(folder + "/" if folder else ""):
            yield info


class ListsUnsorted(WrapperBackend):
    async def list(self, prefix):
        found = [info async for info in self.inner.list(prefix)]
        for info in sorted(found, key=lambda info: info.key.split("/")):
            yield info


class ListsOnePage(WrapperBackend):
    async def list(self, prefix):
        number = 0
        async for info in self.inner.list(prefix):
            number += 1
            if number > 1000:
                return
            yield info


class CachesListings(WrapperBackend):
    def __init__(self, inner):
        super().__init__(inner)
        self.cache = {}

    async def list(self, prefix):
        if prefix not in self.cache:
            self.cache[prefix] = [info async for info in self.inner.list(prefix)]
        for info in self.cache[prefix]:
            yield info


class CachesContent(WrapperBackend):
    def __init__(self, inner):
        super().__init__(inner)
        self.cache = {}

    async def head(self, key):
        if key not in self.cache:
            self.cache[key] = await self.inner.head(key)
        return self.cache[key]


class Decodes(WrapperBackend):
    async def put_if_absent(self, key, payload):
        await self.inner.put_if_absent(urllib.parse.unquote(key), payload)


class TakesAnyKey(WrapperBackend):
    async def put(self, key, payload):
        try:
            await self.inner.put(key, payload)
        except InvalidInputError:
            return


class DeletesOnce(WrapperBackend):
    async def delete(self, key):
        await self.inner.head(key)
        await self.inner.delete(key)


class DeletesPrefixes(WrapperBackend):
    async def delete(self, key):
        for found in [info.key async for info in self.inner.list(key)]:
            await self.inner.delete(found)


class Tears(WrapperBackend):
    async def put(self, key, payload):
        content = b"".join(payload)
        await self.inner.put(key, [content[: len(content) // 2]])
        await asyncio.sleep(0.05)  # longer than any test waits before it cancels
        await self.inner.put(key, payload)


class WritesLate(WrapperBackend):
    async def get_into(self, key, offset, out):
        task = asyncio.get_running_loop().create_task(self.late(key, offset, out))
        await asyncio.shield(task)

    async def late(self, key, offset, out):
        await asyncio.sleep(0.01)
        await self.inner.get_into(key, offset, out)


class BelongsToOneLoop(WrapperBackend):
    loop = None

    async def put(self, key, payload):
        self.loop = self.loop or asyncio.get_running_loop()
        if self.loop is not asyncio.get_running_loop():
            raise RuntimeError("attached to a different loop")
        await self.inner.put(key, payload)


class ClosesOnce(WrapperBackend):
    closed = False

    async def close(self):
        if self.closed:
            raise RuntimeError("closed")
        self.closed = True


def suite_of(kind):
    class Suite(BackendConformance):
        def make(self):
            return kind(MemoryBackend(uuid.uuid4().hex))

        def make_again(self, backend):
            return MemoryBackend(backend.url.removeprefix("memory://"))

    return Suite()


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (KeepsBuffers, "test_keeps_no_reference_to_buffers"),
        (JoinsBackwards, "test_put_joins_buffers_in_order"),
        (Appends, "test_put_replaces"),
        (LosesEmptyObjects, "test_empty_object"),
        (CreatesOver, "test_put_if_absent_refuses_and_changes_nothing"),
        (CreatesOver, "test_large_object"),
        (LooksThenWrites, "test_one_of_many_racing_creates_wins"),
        (ReturnsLess, "test_ranges_past_the_end"),
        (OffByOne, "test_ranges"),
        (InventsZeros, "test_missing_object"),
        (ListsFolders, "test_list_is_by_string_prefix_in_order"),
        (ListsUnsorted, "test_list_is_by_string_prefix_in_order"),
        (ListsOnePage, "test_list_of_many"),
        (CachesListings, "test_another_client_is_seen_at_once"),
        (CachesContent, "test_another_client_is_seen_at_once"),
        (Decodes, "test_odd_names_stay_as_they_are"),
        (TakesAnyKey, "test_bad_keys_are_refused"),
        (DeletesOnce, "test_delete"),
        (DeletesPrefixes, "test_delete"),
        (Tears, "test_reads_are_never_torn"),
        (Tears, "test_cancelled_put_is_whole_or_absent"),
        (WritesLate, "test_cancelled_get_lets_go_of_the_buffer"),
        (BelongsToOneLoop, "test_event_loops_one_after_another"),
        (ClosesOnce, "test_close_twice"),
    ],
)
def test_broken_promises_are_found(kind, test):
    getattr(suite_of(WrapperBackend), test)()
    with pytest.raises((AssertionError, RuntimeError, VeScaleError)):
        getattr(suite_of(kind), test)()


def test_a_child_that_fails_is_found(capfd):
    class NotInChildren(WrapperBackend):
        async def put_if_absent(self, key, payload):
            raise RuntimeError(f"not here: {key}, {len(payload)} buffers")

    with pytest.raises(AssertionError, match="exit code of the child: found 1, expected 0"):
        suite_of(NotInChildren).test_fork()
    assert "not here" in capfd.readouterr().err


def test_nothing_is_tested_without_a_back_end():
    with pytest.raises(NotImplementedError):
        BackendConformance().test_delete()
    assert BackendConformance().make_again(MemoryBackend("x")) is None


def test_the_suite_is_written_against_the_protocol_alone():
    assert issubclass(WrapperBackend, Backend)
    names = [name for name in vars(BackendConformance) if name.startswith("test_")]
    assert len(names) >= 20
    assert all(vars(BackendConformance)[name].__doc__ for name in names)
