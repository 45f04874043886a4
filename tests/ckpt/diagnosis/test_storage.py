from __future__ import annotations

import dataclasses
import uuid

import pytest

from vescale_ckpt.diagnosis.checks import Latency, Level
from vescale_ckpt.diagnosis.storage import try_storage
from vescale_ckpt.errors import StorageError
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.wrappers.wrapper import WrapperBackend


@pytest.fixture
def memory():
    return MemoryBackend(uuid.uuid4().hex)


def levels(backend):
    checks, _ = try_storage(backend)
    return {check.name: check.level for check in checks}


def keys(backend):
    async def listed():
        return [info.key async for info in backend.list("")]

    return loop.run(listed())


def bad(backend):
    return {name for name, level in levels(backend).items() if level is Level.BAD}


def test_a_storage_that_keeps_its_word(memory):
    loop.run(memory.put("packs/x", [b"mine"]))
    checks, latencies = try_storage(memory)
    assert {check.level for check in checks} == {Level.OK}
    assert len(checks) == 7
    assert [latency.verb for latency in latencies] == ["put", "get", "head", "list", "put large", "get large", "delete"]
    assert all(list(latency.seconds) == sorted(latency.seconds) for latency in latencies)
    assert keys(memory) == ["packs/x"], "nothing is left behind"


class IgnoresCondition(WrapperBackend):
    async def put_if_absent(self, key, payload):
        await self.inner.put(key, payload)


class ListsLate(WrapperBackend):
    async def list(self, prefix):
        found = [info async for info in self.inner.list(prefix)]
        for info in found[:-1]:
            yield info


class ListsBackwards(WrapperBackend):
    async def list(self, prefix):
        for info in reversed([info async for info in self.inner.list(prefix)]):
            yield info


class ListsTheDead(WrapperBackend):
    def __init__(self, inner):
        super().__init__(inner)
        self.ever = {}

    async def list(self, prefix):
        async for info in self.inner.list(prefix):
            self.ever[info.key] = info
        for key in sorted(self.ever):
            if key.startswith(prefix):
                yield self.ever[key]


class ReadsStale(WrapperBackend):
    def __init__(self, inner):
        super().__init__(inner)
        self.first = {}

    async def get(self, key):
        return self.first.setdefault(key, await self.inner.get(key))


class PadsRanges(WrapperBackend):
    async def get_into(self, key, offset, out):
        part = (await self.inner.get(key))[offset : offset + len(out)]
        out[: len(part)] = part


class KeepsAll(WrapperBackend):
    async def delete(self, key):
        pass


class NoConditions(WrapperBackend):
    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = dataclasses.replace(inner.capabilities, conditional_put=False)


@pytest.mark.parametrize(
    ("wrapper", "found"),
    [
        (IgnoresCondition, {"create-only put", "create-only put, 8 at once"}),
        (NoConditions, {"create-only put", "create-only put, 8 at once"}),
        (ListsLate, {"list after write"}),
        (ListsBackwards, {"list after write"}),
        (ListsTheDead, {"list after write"}),
        (ReadsStale, {"read after write"}),
        (PadsRanges, {"ranges"}),
        (KeepsAll, {"delete", "list after write"}),
    ],
)
def test_every_broken_promise_is_found(memory, wrapper, found):
    assert bad(wrapper(memory)) == found


def test_a_clock_that_is_wrong_is_noted(memory):
    class Ahead(WrapperBackend):
        async def head(self, key):
            info = await self.inner.head(key)
            return dataclasses.replace(info, modified_seconds=info.modified_seconds + 3600)

    assert levels(Ahead(memory))["clock"] is Level.NOTE


def test_a_storage_that_fails_is_cleaned_up(memory):
    class Failing(WrapperBackend):
        async def head(self, key):
            raise StorageError(f"no {key}")

    with pytest.raises(StorageError):
        try_storage(Failing(memory))
    assert keys(memory) == []


def test_latencies():
    latency = Latency("get", (0.1, 0.2, 0.5), 100)
    assert (latency.median, latency.bytes_per_second) == (0.2, 500.0)
    assert Latency("head", (0.1,), 0).bytes_per_second == 0
