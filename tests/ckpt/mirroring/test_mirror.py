from __future__ import annotations

import time

import pytest
import torch

import vescale_ckpt as vc
from tests.ckpt.collecting.runs import Runs
from vescale_ckpt.errors import SnapshotNotFoundError, StorageError
from vescale_ckpt.mirroring.mirror import mirror_store
from vescale_storage import loop
from vescale_storage.collect.marks import encode_mark, split_marks
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash


@pytest.fixture
def source():
    runs = Runs()
    runs.save(1, same=0, own=1)
    runs.save(2, same=0, own=2)
    runs.save(7, "other", same=0, base="run@2")
    runs.store.tag("run", 1, "best")
    return runs


@pytest.fixture
def target():
    return Runs()


def content(runs, prefix):
    return {key: loop.run(runs.inner.get(key)) for key in runs.keys(prefix)}


def test_the_copy_is_the_store_object_by_object(source, target):
    result = mirror_store(source.store, target.store)
    assert result.is_whole
    assert sorted(result.snapshots) == ["other@7", "run@1", "run@2"]
    assert result.tags == ["run@best"]
    for prefix in ("packs/", "manifests/", "refs/", "index/"):
        assert content(source, prefix) == content(target, prefix), prefix
    target.saved = source.saved
    target.check()


def test_the_next_one_copies_what_is_new(source, target):
    mirror_store(source.store, target.store)
    counting = CountingBackend(target.inner)
    again = mirror_store(source.store, target.on(counting))
    assert (again.packs.num, again.snapshots, len(again.plan.present)) == (0, [], 3)
    assert "put_if_absent" not in counting.counts.requests
    source.save(3, same=0, own=3)
    more = mirror_store(source.store, target.store)
    assert (more.packs.num, more.snapshots) == (1, ["run@3"])


def test_packs_that_came_from_elsewhere_are_not_copied_again(source, target):
    mirror_store(source.store, target.store, runs=["run"])
    result = mirror_store(source.store, target.store)
    assert (result.packs.num, result.snapshots) == (0, ["other@7"])


def test_a_dry_run_writes_nothing_and_makes_no_store(source, target):
    result = mirror_store(source.store, target.store, dry_run=True)
    assert result.plan.num_packs == 2
    assert (result.packs.num, result.snapshots) == (0, [])
    assert target.keys() == []


def test_runs_by_name(source, target):
    mirror_store(source.store, target.store, runs=["other"])
    assert target.store.runs() == ["other"]
    with pytest.raises(SnapshotNotFoundError, match="nope"):
        mirror_store(source.store, target.store, runs=["nope"])


@pytest.mark.parametrize("point", range(3, 24, 4))
def test_one_that_dies_leaves_whole_snapshots_and_the_next_goes_on(source, target, point):
    target.store.require(create=True)
    faults = FaultBackend(target.inner, kill_at=point)
    try:
        mirror_store(source.store, target.on(faults))
        died = False
    except SimulatedCrash:
        died = True
    store = vc.Store(target.inner, exists=True)
    for run in store.runs():
        for info in store.snapshots(run):
            assert store[info.name].verify().ok
    result = mirror_store(source.store, vc.Store(target.inner, exists=True))
    assert result.is_whole
    assert died or not result.snapshots
    target.saved = source.saved
    target.check()


def test_what_is_damaged_at_the_source_is_not_copied_nor_referred_to(source, target):
    own = source.packs(2) - source.packs(1)
    key = pack_key(own.pop())
    body = bytearray(loop.run(source.inner.get(key)))
    body[10] ^= 1
    loop.run(source.inner.put(key, [bytes(body)]))
    result = mirror_store(source.store, target.store)
    assert not result.is_whole
    assert len(result.failed) == 1
    assert "run@2" in result.failed[0]
    assert "damaged" in result.failed[0]
    assert key not in target.keys("packs/")
    del source.saved["run", 2]
    target.saved = source.saved
    target.check()


def test_damage_at_the_target_is_put_right(source, target):
    mirror_store(source.store, target.store)
    ref = source.store["run@2"].ref
    key = pack_key((source.packs(2) - source.packs(1)).pop())
    loop.run(target.inner.put(key, [b"short"]))
    loop.run(target.inner.put(manifest_key(ref.manifest), [b"no manifest"]))
    loop.run(target.inner.delete(ref.key))
    assert mirror_store(source.store, vc.Store(target.inner, exists=True)).snapshots == ["run@2"]
    target.saved = source.saved
    target.check()


def test_another_snapshot_in_the_target_stays(source, target):
    target.save(1, mine=5)
    result = mirror_store(source.store, target.store)
    assert result.plan.conflicts[0].startswith("run@1")
    assert not result.is_whole
    assert torch.equal(vc.Store(target.inner, exists=True)["run@1"].read("mine"), source_of(5))


def source_of(seed):
    return torch.arange(1024, dtype=torch.int64) + seed * 1_000_000


def test_a_collection_of_the_target_is_heeded(source, target):
    target.store.require(create=True)
    name = (source.packs(2) - source.packs(1)).pop()
    for mark in split_marks([name], [], now=time.time(), grace_seconds=3600):
        loop.run(target.inner.put(mark.key, encode_mark(mark)))
    result = mirror_store(source.store, target.store)
    assert result.plan.held_back == ("run@2",)
    assert not result.is_whole
    assert "run@1" in result.snapshots


def test_it_serves_as_the_mirror_that_heals(source, target, tmp_path):
    with vc.open_store(tmp_path / "a") as a, vc.Checkpointer(a, "run") as checkpointer:
        checkpointer.save(1, {"w": torch.arange(1000)})
        with vc.open_store(tmp_path / "b") as b:
            mirror_store(a, b)
    pack = next((tmp_path / "a" / "packs").glob("*/*"))
    pack.chmod(0o644)
    pack.write_bytes(b"gone")
    with vc.open_store(tmp_path / "a", mirror=tmp_path / "b") as healing:
        assert len(healing.heal("run@1").healed) == 1
    with vc.open_store(tmp_path / "a") as a:
        assert a["run@1"].verify().ok


def test_a_storage_that_fails_is_told(source, target):
    class Failing(CountingBackend):
        async def put_if_absent(self, key, payload):
            if key.startswith("packs/"):
                raise StorageError("no space")
            await super().put_if_absent(key, payload)

    with pytest.raises(StorageError, match="no space"):
        mirror_store(source.store, vc.Store(Failing(target.inner), exists=False))
