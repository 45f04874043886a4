from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import vescale_ckpt as vc
from tests.ckpt.collecting.runs import HOUR, Runs, tensor
from vescale_ckpt.collecting import repack
from vescale_ckpt.collecting.repack import rewriting_of
from vescale_storage import loop, refs
from vescale_storage.collect.marks import Mark, encode_mark, new_mark_name
from vescale_storage.keys import pack_key, ref_key
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash, When
from vescale_storage.wrappers.wrapper import WrapperBackend


def sparse(*, steps=(2, 3)) -> Runs:
    """Return a store whose steps share one tensor of a pack that is mostly dead, and have one of their own."""
    runs = Runs()
    runs.save(1, a=1, b=2, c=3, same=0)
    for step in steps:
        runs.save(step, same=0, own=10 + step)
    runs.delete(1)
    runs.hours += 2
    return runs


def size(runs: Runs) -> int:
    return sum(loop.run(runs.inner.head(key)).size_bytes for key in runs.keys("packs/"))


def test_what_is_needed_of_a_mostly_dead_pack_moves_and_the_snapshots_follow():
    runs = sparse()
    (old,) = runs.packs(2) & runs.packs(3)
    before = size(runs)
    report = runs.gc(repack=True).repacked
    assert [pack.name for pack in report.plan.packs] == [old]
    assert report.snapshots == ("run@2", "run@3")
    assert (report.copied.num, report.written.num) == (1, 1)
    assert (report.skipped, report.damaged, report.plan.replaced) == ((), (), ())
    runs.check()
    assert old not in runs.needed()
    assert old in runs.stored(), "loads that began before may still read it"
    runs.collect_all()
    runs.check()
    assert runs.stored() == runs.needed()
    assert size(runs) < before
    assert len(runs.packs(2) & runs.packs(3)) == 1, "what they share they still share"
    assert len(runs.keys("index/")) == 2
    report = runs.save(1, run="other", options=vc.SaveOptions(dedup_across_runs=True), same=0)
    assert report.bytes_deduplicated == 8192, "and others find it"


def test_only_the_place_of_chunks_changes():
    runs = sparse()
    before = {step: (runs.store[f"run@{step}"].ref, runs.store[f"run@{step}"].manifest) for step in (2, 3)}
    runs.gc(repack=True)
    for step, (old_ref, old) in before.items():
        snapshot = vc.Store(runs.inner, exists=True)[f"run@{step}"]
        new = snapshot.manifest
        assert (snapshot.ref.version, snapshot.ref.created_seconds) == (2, old_ref.created_seconds)
        assert new.transaction != old.transaction
        for what in ("run", "step", "created_seconds", "world_size", "tree", "tensors", "writer", "metadata"):
            assert getattr(new, what) == getattr(old, what)
        assert [key.version for key in loop.run(refs.list_ref_keys(runs.inner, "run")) if key.step == step] == [2]


def test_a_dry_run_only_tells():
    runs = sparse()
    before = runs.keys()
    report = runs.gc(repack=True, dry_run=True).repacked
    assert len(report.plan.packs) == 1
    assert (report.dry_run, report.snapshots, report.written.num) == (True, (), 0)
    assert runs.keys() == before


def test_compressed_chunks_are_copied_as_they_are():
    runs = Runs()
    with vc.Checkpointer(runs.store, "run", options=vc.SaveOptions(codec="zstd")) as checkpointer:
        checkpointer.save(1, {"same": torch.zeros(5000), "big": torch.rand(9000)})
        checkpointer.save(2, {"same": torch.zeros(5000)})
    runs.store.delete("run", 1)
    runs.hours += 2
    report = runs.gc(repack=True).repacked
    assert report.copied.num == 1
    assert report.copied.size_bytes < 2000
    snapshot = vc.Store(runs.inner, exists=True)["run@2"]
    assert snapshot.verify().ok
    assert snapshot.manifest.chunks.codec.tolist() == [1]


def test_many_chunks_fill_several_packs(monkeypatch):
    monkeypatch.setattr(repack, "_PACK_BYTES", 10_000)
    runs = Runs()
    runs.save(1, **{f"t{i}": i for i in range(12)})
    runs.save(2, **{f"t{i}": i for i in range(5)})
    runs.delete(1)
    runs.hours += 2
    report = runs.gc(repack=True).repacked
    assert (report.copied.num, report.written.num) == (5, 3)
    runs.check()
    runs.collect_all()
    runs.check()
    assert runs.stored() == runs.needed()


def test_tagged_snapshots_hold_their_packs_until_the_tag_is_gone():
    runs = sparse()
    runs.store.tag("run", 2, "best")
    report = runs.gc(repack=True).repacked
    assert (report.plan.packs, report.plan.pinned.num) == ((), 1)
    runs.store.untag("run", "best")
    assert runs.gc(repack=True).repacked.snapshots == ("run@2", "run@3")
    runs.check()


def test_a_damaged_chunk_is_not_copied_and_its_pack_stays():
    runs = sparse()
    (old,) = runs.packs(2) & runs.packs(3)
    snapshot = runs.store["run@2"]
    row = snapshot.manifest.chunks.rows(snapshot.manifest.find("same"))[0]
    data = bytearray(loop.run(runs.inner.get(pack_key(old))))
    data[int(snapshot.manifest.chunks.offset[row])] ^= 1
    loop.run(runs.inner.put(pack_key(old), [data]))
    report = runs.gc(repack=True).repacked
    assert (report.damaged, report.snapshots, report.written.num) == ((old,), (), 0)
    assert runs.store["run@2"].ref.version == 1
    assert torch.equal(runs.store["run@2"].read("own"), tensor(12))
    loop.run(runs.inner.put(pack_key(old), [data[:17_000]]))
    assert runs.gc(repack=True).repacked.damaged == (old,)


# ---- others at work


class Before(WrapperBackend):
    """Does something right before the first create-only put under a prefix."""

    def __init__(self, inner, prefix, action):
        super().__init__(inner)
        self.prefix, self.action = prefix, action

    async def put_if_absent(self, key, payload):
        if key.startswith(self.prefix) and self.action is not None:
            action, self.action = self.action, None
            await action()
        await self.inner.put_if_absent(key, payload)


def test_a_step_that_is_saved_again_meanwhile_keeps_what_was_saved():
    runs = sparse(steps=(2,))
    other = runs.store["run@2"].ref.manifest

    async def save():
        await refs.create_ref(runs.inner, "run", 2, manifest=other, transaction="e" * 32, now=1.0)

    report = runs.gc(store=runs.on(Before(runs.inner, ref_key("run", 2, 2), save)), repack=True).repacked
    assert report.snapshots == ()
    assert "version 2 is there already" in report.skipped[0]
    assert loop.run(refs.read_ref(runs.inner, "run", 2)).transaction == "e" * 32
    runs.check()


def test_a_step_that_is_deleted_meanwhile_is_not_made_again():
    runs = sparse(steps=(2,))

    async def delete():
        await runs.inner.delete(ref_key("run", 2, 1))

    report = runs.gc(store=runs.on(Before(runs.inner, "manifests/", delete)), repack=True).repacked
    assert "deleted meanwhile" in report.skipped[0]
    assert runs.store.newest("run") is None
    runs.saved.clear()
    runs.collect_all()
    assert runs.stored() == set()


def test_a_tag_that_comes_meanwhile_keeps_its_version():
    runs = sparse(steps=(2,))

    async def tag():
        await refs.set_tag(runs.inner, "run", "best", 2, now=1.0)

    runs.gc(store=runs.on(Before(runs.inner, ref_key("run", 2, 2), tag)), repack=True)
    assert [key.version for key in loop.run(refs.list_ref_keys(runs.inner, "run"))] == [1, 2]
    runs.collect_all(repack=True)
    runs.check()
    assert vc.Store(runs.inner, exists=True)["run@best"].verify().ok


def test_two_at_once_come_to_one_new_version():
    runs = sparse()
    other = []

    async def another():
        with ThreadPoolExecutor(1) as pool:
            running = asyncio.get_running_loop()
            other.append(await running.run_in_executor(pool, lambda: runs.gc(repack=True)))

    mine = runs.gc(store=runs.on(Before(runs.inner, ref_key("run", 2, 2), another)), repack=True)
    assert other[0].repacked.snapshots == ("run@2", "run@3")
    assert mine.repacked.snapshots == ("run@2",), "the other's is as good as its own"
    runs.check()
    assert [(key.step, key.version) for key in loop.run(refs.list_ref_keys(runs.inner, "run"))] == [(2, 2), (3, 2)]
    runs.collect_all()
    runs.check()
    assert runs.stored() == runs.needed()


def test_what_another_collection_marks_meanwhile_is_not_committed_when_it_is_late(monkeypatch):
    runs = sparse(steps=(2,))
    monkeypatch.setattr(repack.Repacker, "_is_late", lambda _self: False)

    async def mark():
        mine = Mark(new_mark_name(runs.now), runs.now, 0.0, frozenset(marked), frozenset())
        await runs.inner.put(mine.key, encode_mark(mine))

    marked = runs.packs(2)
    report = runs.gc(store=runs.on(Before(runs.inner, "manifests/", mark)), repack=True).repacked
    assert "marked its packs" in report.skipped[0]
    assert runs.store["run@2"].ref.version == 1


def test_a_name_that_is_marked_is_not_used_for_a_new_pack():
    runs = sparse()
    runs.gc(store=runs.on(runs.inner), repack=True)
    (made,) = runs.packs(2) & runs.packs(3)
    again = sparse()
    # The same chunks make the same pack; here its name is one that is going to be deleted.
    mark = Mark(new_mark_name(again.now), again.now, HOUR, frozenset({made}), frozenset())
    loop.run(again.inner.put(mark.key, encode_mark(mark)))
    again.gc(repack=True)
    assert made not in again.needed()
    again.check()
    plain = sparse()
    plain.gc(repack=True)
    assert made in plain.needed()


def test_it_begins_nothing_new_after_its_time(monkeypatch):
    runs = sparse()
    monkeypatch.setattr(repack.Repacker, "_is_late", lambda _self: True)
    report = runs.gc(repack=True).repacked
    assert (report.copied.num, report.snapshots) == (0, ())
    assert len(report.skipped) == 2
    monkeypatch.undo()
    assert runs.gc(repack=True).repacked.snapshots == ("run@2", "run@3")


# ---- crashes


@pytest.mark.parametrize("when", list(When))
def test_killed_at_any_operation_every_snapshot_is_whole_and_the_next_one_finishes(when):
    at = 0
    while True:
        runs = sparse()
        backend = FaultBackend(runs.inner, kill_at=at, kill_when=when)
        try:
            runs.gc(store=runs.on(backend), repack=True)
            break
        except SimulatedCrash:
            pass
        runs.check()
        runs.collect_all(repack=True)
        runs.check()
        assert runs.stored() == runs.needed(), at
        assert len(loop.run(refs.list_ref_keys(runs.inner, "run"))) == 2
        assert runs.store["run@2"].ref.version == 2
        at += 1
    assert at > 30


def test_the_transaction_of_a_rewriting_follows_from_what_is_rewritten():
    assert rewriting_of("ab" * 32) == rewriting_of("ab" * 32) != rewriting_of("cd" * 32)
    assert len(rewriting_of("ab" * 32)) == 32
