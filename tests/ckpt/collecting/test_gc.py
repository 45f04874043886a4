from __future__ import annotations

import time

import pytest

from tests.ckpt.collecting.runs import HOUR, Runs
from vescale_ckpt.collecting.gc import packs_of
from vescale_ckpt.errors import CorruptionError, FormatError, UnsupportedVersionError
from vescale_ckpt.retention import RetentionPolicy
from vescale_storage import loop, root
from vescale_storage.keys import STORE_KEY, manifest_key
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash, When


def two_of_three() -> Runs:
    """Return a store with two steps that share a tensor with a deleted third one, an hour old."""
    runs = Runs()
    runs.save(1, same=0, own=1)
    runs.save(2, same=0, own=2)
    runs.save(3, same=0, own=3)
    runs.delete(2)
    runs.hours += 1.5
    return runs


def test_packs_of_a_manifest_are_those_of_its_table():
    runs = Runs()
    runs.save(1, a=1)
    runs.save(2, a=1, b=2)
    manifest = runs.store["run@2"].manifest
    data = loop.run(runs.inner.get(manifest_key(runs.store["run@2"].ref.manifest)))
    assert packs_of(data) == [pack.name for pack in manifest.packs]
    assert len(packs_of(data)) == 2
    with pytest.raises(FormatError):
        packs_of(data[8:])
    with pytest.raises(CorruptionError):
        packs_of(data[:-8])
    with pytest.raises(UnsupportedVersionError):
        packs_of(data[:8] + b"\x02\0" + data[10:])


def test_what_a_deleted_snapshot_had_for_itself_goes_and_what_others_share_stays():
    runs = two_of_three()
    before = runs.stored()
    first = runs.gc()
    assert (first.collection.done.marked.num, first.collection.done.deleted.num) == (2, 0)
    assert runs.stored() == before
    runs.hours += 1
    second = runs.gc()
    assert (second.collection.done.packs.num, second.collection.done.manifests.num) == (1, 1)
    assert runs.stored() == runs.needed()
    assert len(runs.keys("index/")) == 2, "an index object goes with its manifest"
    runs.check()
    assert second.repacked is None
    assert not second.dry_run


def test_saves_go_on_while_things_are_marked_and_after():
    runs = two_of_three()
    runs.gc()
    runs.save(4, same=0, own=2)  # as the deleted one, whose pack is marked
    runs.check()
    runs.hours += 1
    runs.gc()
    runs.check()
    runs.save(5, same=0, own=2)
    runs.collect_all()
    runs.check()
    assert runs.stored() == runs.needed()


def test_tags_keep_their_snapshot():
    runs = two_of_three()
    runs.store.tag("run", 1, "best")
    runs.collect_all()
    runs.check()
    runs.store.untag("run", "best")
    runs.delete(1)
    runs.collect_all()
    runs.check()
    assert runs.stored() == runs.needed()


def test_every_version_of_a_step_is_kept_until_it_is_superseded_and_pruned():
    runs = Runs()
    runs.save(1, a=1)
    old = runs.packs(1)
    runs.save(1, a=2)
    runs.collect_all()
    assert old <= runs.stored()
    assert runs.store.prune("run", RetentionPolicy(keep_last=1), now=runs.now).num_superseded == 1
    runs.collect_all()
    assert runs.stored() == runs.needed()
    runs.check()


def test_a_dry_run_needs_no_right_to_write_and_shows_what_is_due():
    runs = two_of_three()
    runs.gc()
    runs.hours += 1
    counted = CountingBackend(runs.inner)
    shown = runs.store.__class__(counted, exists=True).gc(HOUR, dry_run=True, repack=True, now=runs.now)
    assert shown.collection.plan.deletable.num == 2
    assert set(counted.counts.requests) <= {"list", "get", "get_into", "head", "leftovers"}
    assert shown.dry_run
    assert shown.repacked.dry_run


def test_the_storages_clock_is_the_one_that_counts(monkeypatch):
    """A machine whose clock is a year ahead must not take fresh packs for old ones."""
    runs = two_of_three()
    real = time.time
    report = runs.store.gc(HOUR, dry_run=False)
    assert report.collection.plan.young.num == 2
    monkeypatch.setattr("vescale_ckpt.collecting.gc.time.time", lambda: real() + 366 * 86400)
    plan = runs.store.gc(HOUR, dry_run=True).collection.plan
    assert plan.to_mark, "a dry run trusts this machine, as it deletes nothing"
    assert runs.keys("gc/") == []


def test_an_empty_store_is_collected():
    runs = Runs()
    runs.store.require(create=True)
    assert runs.gc(repack=True).collection.plan.is_empty


# ---- damage


@pytest.mark.parametrize("repack", [False, True])
def test_damage_of_any_root_stops_everything_and_is_named(repack):
    runs = two_of_three()
    runs.gc()
    runs.hours += 5
    key = manifest_key(runs.store["run@1"].ref.manifest)
    whole = loop.run(runs.inner.get(key))
    before = runs.keys()
    for damage in (whole[:-1], b"", whole[:50] + b"\xff" + whole[51:]):
        loop.run(runs.inner.put(key, [damage]))
        with pytest.raises(CorruptionError, match=r"run@1 needs.*nothing was deleted"):
            runs.gc(repack=repack)
        assert runs.keys() == before
    loop.run(runs.inner.delete(key))
    with pytest.raises(CorruptionError, match="run@1 needs"):
        runs.gc(grace_seconds=0, repack=repack)
    loop.run(runs.inner.put(key, [whole]))
    runs.gc(repack=repack)
    runs.check()


def test_a_store_of_a_newer_minor_version_is_read_but_not_collected():
    runs = two_of_three()
    newer = root.Root("0" * 32, (1, 7), "blake3-256", 1.0)
    loop.run(runs.inner.put(STORE_KEY, [root.encode_root(newer)]))
    runs.check()
    with pytest.raises(UnsupportedVersionError, match=r"1\.7.*cannot tell what else"):
        runs.gc()


# ---- crashes, with saves and loads afterwards


@pytest.mark.parametrize("when", list(When))
def test_killed_at_any_operation_everything_can_be_loaded_saved_and_collected(when):
    at = 0
    while True:
        runs = two_of_three()
        runs.gc()
        runs.hours += 1
        backend = FaultBackend(runs.inner, kill_at=at, kill_when=when)
        try:
            runs.gc(store=runs.on(backend))
            break
        except SimulatedCrash:
            pass
        runs.check()
        runs.save(9, same=0, own=2)
        runs.check()
        runs.collect_all()
        runs.check()
        assert runs.stored() == runs.needed(), at
        assert runs.keys("gc/") == []
        assert len(runs.keys("index/")) == 3
        at += 1
    assert at > 10
