from __future__ import annotations

import json
import uuid

import pytest

from vescale_storage import loop, refs
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.collect.roots import RootReader
from vescale_storage.digest import hexdigest
from vescale_storage.errors import CorruptionError, FormatError, ObjectNotFoundError, UnsupportedVersionError
from vescale_storage.keys import manifest_key, ref_key
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.wrapper import WrapperBackend


def memory():
    return MemoryBackend(uuid.uuid4().hex)


def packs_of(data: bytes) -> list[str]:
    try:
        return json.loads(data)
    except ValueError as error:
        raise FormatError("no JSON") from error


def commit(backend, run, step, packs, transaction=1):
    """Put a manifest that is a list of packs, and a ref to it; return both names."""
    data = json.dumps([pack * 32 for pack in packs]).encode()
    name = hexdigest(data)
    loop.run(backend.put(manifest_key(name), [data]))
    ref = loop.run(
        refs.create_ref(backend, run, step, manifest=name, transaction=f"{transaction:032x}", now=float(transaction))
    )
    return name, ref


def read(backend):
    return loop.run(RootReader(backend, packs_of).read())


def test_every_version_of_every_step_of_every_run_and_every_tag_is_a_root():
    backend = memory()
    first, _ = commit(backend, "a", 1, ["11"])
    second, _ = commit(backend, "a", 1, ["22"], 2)
    third, _ = commit(backend, "b b", 7, ["22", "33"], 3)
    loop.run(refs.set_tag(backend, "b b", "best", 7, now=1.0))
    loop.run(backend.delete(ref_key("b b", 7, 1)))  # the tag holds what the ref held
    roots = read(backend)
    assert set(roots.packs_of) == {first, second, third}
    assert roots.packs == {"11" * 32, "22" * 32, "33" * 32}
    assert [(ref.run, ref.version) for ref in roots.refs] == [("a", 1), ("a", 2)]
    assert roots.names_of(third) == ["b b@best"]
    assert roots.names_of(first) == ["a@1"]


def test_a_shared_manifest_is_read_once_and_a_second_reading_reads_only_what_is_new():
    backend = CountingBackend(memory())
    for step in range(5):
        commit(backend, "a", step, ["11"])
    before = backend.counts
    reader = RootReader(backend, packs_of)
    progress = []
    loop.run(reader.read(lambda what, num: progress.append((what, num))))
    cost = (backend.counts - before).requests
    assert cost == {"list": 2, "get_into": 5, "get": 1}
    assert progress == [("manifests read", 1)]
    commit(backend, "a", 9, ["22"])
    before = backend.counts
    assert loop.run(reader.read()).packs == {"11" * 32, "22" * 32}
    assert (backend.counts - before).requests["get"] == 1


def test_an_empty_store_has_no_roots():
    roots = read(memory())
    assert (roots.refs, roots.tags, roots.packs) == ((), (), frozenset())


# ---- damage: nothing can be told, so everything stops


def flip(backend, key):
    data = bytearray(loop.run(backend.get(key)))
    data[-2] ^= 1
    loop.run(backend.put(key, [data]))


def test_a_manifest_that_is_gone_is_named_with_its_snapshots():
    backend = memory()
    name, _ = commit(backend, "run", 5, ["11"])
    loop.run(refs.set_tag(backend, "run", "best", 5, now=1.0))
    loop.run(backend.delete(manifest_key(name)))
    with pytest.raises(CorruptionError, match=r"run@5, run@best needs.*nothing was deleted") as caught:
        read(backend)
    assert caught.value.context["key"] == manifest_key(name)


def test_a_changed_manifest_is_named():
    backend = memory()
    name, _ = commit(backend, "run", 5, ["11"])
    flip(backend, manifest_key(name))
    with pytest.raises(CorruptionError, match=r"run@5 needs.*digest in its name"):
        read(backend)


def test_a_manifest_that_cannot_be_understood_is_named():
    backend = memory()
    loop.run(backend.put(manifest_key(hexdigest(b"[")), [b"["]))
    loop.run(refs.create_ref(backend, "run", 5, manifest=hexdigest(b"["), transaction="0" * 32, now=1.0))
    with pytest.raises(FormatError, match=r"run@5 needs.*no JSON"):
        read(backend)

    def newer(_data):
        raise UnsupportedVersionError("version 2")

    with pytest.raises(UnsupportedVersionError, match=r"run@5 needs.*version 2"):
        loop.run(RootReader(backend, newer).read())


@pytest.mark.parametrize("what", ["ref", "tag"])
def test_a_changed_ref_or_tag_is_named(what):
    backend = memory()
    _, ref = commit(backend, "run", 5, ["11"])
    tag = loop.run(refs.set_tag(backend, "run", "best", 5, now=1.0))
    key = ref.key if what == "ref" else tag.key
    flip(backend, key)
    with pytest.raises(CorruptionError, match="nothing was deleted") as caught:
        read(backend)
    assert caught.value.context["key"] == key


def test_unknown_things_among_the_refs_could_be_roots_of_a_newer_version():
    backend = memory()
    loop.run(backend.put("refs/run/branches/main", [b"?"]))
    with pytest.raises(FormatError, match="refs/run/branches/main"):
        read(backend)


# ---- races


def test_a_ref_that_is_deleted_while_it_is_read_is_no_root():
    backend = FaultBackend(memory())
    commit(backend, "a", 1, ["11"])
    commit(backend, "a", 2, ["22"])
    rule = backend.fail("get_into", ObjectNotFoundError("gone"), prefix=ref_key("a", 1, 1))
    assert read(backend).packs == {"22" * 32}
    assert rule.num_hit == 1


@pytest.mark.parametrize("now", [1.0, 1234567.25], ids=["shorter", "longer"])
def test_a_ref_that_is_made_anew_since_the_listing_is_no_damage(now):
    inner = memory()
    name, ref = commit(inner, "a", 1, ["11"], transaction=1234)

    class MadeAnew(WrapperBackend):
        done = False

        async def get_into(self, key, offset, out):
            if not self.done:  # the first look at it after the listings
                self.done = True
                await inner.delete(ref.key)
                await refs.create_ref(inner, "a", 1, manifest=name, transaction=f"{2:032x}", now=now)
            await inner.get_into(key, offset, out)

    assert [ref.created_seconds for ref in read(MadeAnew(inner)).refs] == [now]


def test_a_manifest_that_went_with_its_last_ref_is_no_damage():
    inner = memory()
    name, ref = commit(inner, "a", 1, ["11"])

    class Deleting(WrapperBackend):
        async def get(self, key):
            await inner.delete(ref.key)
            await inner.delete(manifest_key(name))
            return await inner.get(key)

    assert read(Deleting(inner)).packs == frozenset()


class Stale(WrapperBackend):
    """A listing that is not one moment: while it passes, a snapshot is tagged and its ref deleted."""

    def __init__(self, inner, change):
        super().__init__(inner)
        self.change = change
        self.num_lists = 0

    async def list(self, prefix):
        self.num_lists += 1
        first = self.num_lists == 1
        keys = [info async for info in self.inner.list(prefix)]
        if first:
            await self.change()
        for info in keys:
            try:
                yield await self.inner.head(info.key)  # as the memory back end does: what is gone is not shown
            except ObjectNotFoundError:
                continue


def test_a_snapshot_that_is_tagged_and_then_deleted_during_the_listing_is_a_root_all_the_same():
    inner = memory()
    commit(inner, "a", 1, ["11"])

    async def change():
        await refs.set_tag(inner, "a", "best", 1, now=1.0)
        await inner.delete(ref_key("a", 1, 1))

    assert read(Stale(inner, change)).packs == {"11" * 32}
