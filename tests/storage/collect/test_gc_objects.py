from __future__ import annotations

import asyncio
import uuid

from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.collect.gc_objects import MarkReader, list_gc
from vescale_storage.collect.marks import (
    DEFAULT_GRACE_SECONDS,
    Mark,
    Sweep,
    clock_key,
    encode_mark,
    encode_sweep,
    new_mark_name,
)
from vescale_storage.errors import ObjectNotFoundError
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.wrapper import WrapperBackend


def memory():
    return MemoryBackend(uuid.uuid4().hex)


def mark_of(*packs: str, at: float = 5.0) -> Mark:
    return Mark(new_mark_name(at), at, 10.0, frozenset(pack * 32 for pack in packs), frozenset())


def put(backend, *objects):
    for each in objects:
        data = encode_mark(each) if isinstance(each, Mark) else [encode_sweep(each)]
        loop.run(backend.put(each.key, data))


def flip(backend, key):
    data = bytearray(loop.run(backend.get(key)))
    data[-1] ^= 1
    loop.run(backend.put(key, [data]))


def test_marked_is_what_any_mark_names():
    backend = memory()
    assert loop.run(MarkReader(backend).marked()).packs == frozenset()
    put(backend, mark_of("ab", "cd"), mark_of("ef"), mark_of())
    marked = loop.run(MarkReader(backend).marked())
    assert marked.packs == {"ab" * 32, "cd" * 32, "ef" * 32}
    assert marked.unreadable == ()


def test_a_mark_is_read_once_and_forgotten_when_it_is_gone():
    backend = CountingBackend(memory())
    reader = MarkReader(backend)
    first, second = mark_of("ab"), mark_of("cd")
    put(backend, first)
    for _ in range(3):
        assert loop.run(reader.marked()).packs == {"ab" * 32}
    assert (backend.counts.requests["get_into"], backend.counts.requests["list"]) == (1, 3)
    put(backend, second)
    assert loop.run(reader.marked()).packs == {"ab" * 32, "cd" * 32}
    assert backend.counts.requests["get_into"] == 2
    loop.run(backend.delete(first.key))
    assert loop.run(reader.marked()).packs == {"cd" * 32}
    assert backend.counts.requests["get_into"] == 2


def test_what_cannot_be_read_is_told_and_heals_with_the_object():
    backend = memory()
    reader = MarkReader(backend)
    mark = mark_of("ab")
    put(backend, mark)
    flip(backend, mark.key)
    marked = loop.run(reader.marked())
    assert marked.unreadable == (mark.key,)
    assert "ff" * 32 in marked
    put(backend, mark)
    assert loop.run(reader.marked()).unreadable == ()


def test_a_mark_that_vanishes_while_it_is_read_is_over():
    backend = FaultBackend(memory())
    put(backend, mark_of("ab"))
    rule = backend.fail("get_into", ObjectNotFoundError("gone"))
    assert loop.run(MarkReader(backend).marked()).packs == frozenset()
    assert rule.num_hit == 1


def test_a_call_that_listed_earlier_takes_nothing_from_one_that_listed_later():
    """Two saves of one process share the reader; each must heed all that was there when it looked."""
    inner = memory()
    first, second, third = mark_of("ab"), mark_of("cd"), mark_of("ef")
    put(inner, first)

    class Slow(WrapperBackend):
        async def list(self, prefix):
            found = [info async for info in self.inner.list(prefix)]
            if len(found) == 1:
                listed.set()
                await read_one.wait()  # an old listing that arrives late
            for info in found:
                yield info

        async def get_into(self, key, offset, out):
            await self.inner.get_into(key, offset, out)
            if key == third.key:  # the late call waits for this, has the others, and the early one ends meanwhile
                await asyncio.sleep(0.01)
                read_one.set()
                await asyncio.wait([early])

    async def main():
        nonlocal early, listed, read_one
        listed, read_one = asyncio.Event(), asyncio.Event()
        reader = MarkReader(Slow(inner))
        early = asyncio.ensure_future(reader.marked())
        await listed.wait()
        for mark in (second, third):
            await inner.put(mark.key, encode_mark(mark))
        async with asyncio.timeout(10):
            late = await reader.marked()
            await early
        return late

    early = listed = read_one = None
    assert loop.run(main()).packs == {"ab" * 32, "cd" * 32, "ef" * 32}


def test_everything_under_gc_is_sorted_out():
    backend = memory()
    whole, damaged, swept = mark_of("ab"), mark_of("cd"), mark_of("ef")
    sweep = Sweep(swept.name, 7.0, 10.0, "0" * 16)
    torn = Sweep(whole.name, 7.0, 10.0, "0" * 16)
    put(backend, whole, damaged, swept, sweep, torn)
    flip(backend, damaged.key)
    flip(backend, torn.key)
    clock = clock_key()
    loop.run(backend.put(clock, [b"?"]))
    loop.run(backend.put("gc/README", [b"?"]))
    found = loop.run(list_gc(backend))
    assert found.marks == {whole.name: whole, swept.name: swept}
    assert found.damaged == [damaged.name]
    assert found.sweeps[swept.name] == sweep
    # Damaged, it still says that somebody else acts on the mark; the storage says since when.
    assert found.sweeps[whole.name].grace_seconds == DEFAULT_GRACE_SECONDS
    assert found.sweeps[whole.name].begun_seconds > 1e9
    assert [info.key for info in found.clocks] == [clock]
    assert found.strange == ["gc/README"]
