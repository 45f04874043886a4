"""C052, C058, C072 to C078 and C138: retention and collection that took what was needed, or cost too much."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

import vescale_ckpt as vc
import vescale_ckpt.errors
from tests.ckpt.collecting.runs import HOUR, Runs, tensor
from tests.faults.gate import Gate, Standing
from vescale_storage import loop
from vescale_storage.backends.local import LocalBackend
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash, When


def steps(store: vc.Store, run: str = "run") -> list[int]:
    return [info.step for info in store.snapshots(run)]


# ---- C052: the old one was pruned before the new one was there


def test_c052_the_old_snapshot_goes_after_the_new_one_is_committed_and_not_before():
    runs = Runs()
    with vc.Checkpointer(runs.store, "run", keep_last=1) as checkpointer:
        checkpointer.save(500, {"w": tensor(1)})
    # A slow save of 1000, held up right before its commit, and then the process dies.
    gate = Gate(runs.inner, 0, verb="put_if_absent", prefix="refs/")
    dying = FaultBackend(gate)
    died = vc.Checkpointer(runs.on(dying), "run", keep_last=1)
    slow = Standing(gate, lambda: died.save(1000, {"w": tensor(2)}, blocking=False).result())
    assert slow.stands
    assert steps(runs.store) == [500]
    dying.dead = True
    with pytest.raises(SimulatedCrash):
        slow.finish()
    loop.run(runs.inner.delete("refs/run/000000001000.000001"))  # what it had begun to put does not come
    assert steps(runs.store) == [500]
    assert torch.equal(runs.store["run"].read("w"), tensor(1))

    with vc.Checkpointer(runs.store, "run", keep_last=1) as checkpointer:
        handle = checkpointer.save(1000, {"w": tensor(2)}, blocking=False)
        handle.result()
    assert steps(runs.store) == [1000]
    assert torch.equal(runs.store["run"].read("w"), tensor(2))


@pytest.mark.parametrize("when", list(When))
def test_c052_killed_at_any_operation_the_newest_complete_snapshot_is_there(when):
    at = 0
    while True:
        runs = Runs()
        with vc.Checkpointer(runs.store, "run", keep_last=1) as checkpointer:
            checkpointer.save(500, {"w": tensor(1)})
        dying = FaultBackend(runs.inner, kill_at=at, kill_when=when)
        checkpointer = vc.Checkpointer(runs.on(dying), "run", keep_last=1)
        with contextlib.suppress(SimulatedCrash):
            checkpointer.save(1000, {"w": tensor(2)})
        if not dying.dead:
            break
        found = steps(runs.store)
        assert found in ([500], [500, 1000], [1000])
        for step in found:
            assert torch.equal(runs.store[f"run@{step}"].read("w"), tensor(1 if step == 500 else 2))
        at += 1
    assert at > 10
    assert steps(runs.store) == [1000]


def test_a_failed_deletion_is_logged_and_no_save_fails_by_it(caplog):
    runs = Runs()
    faulty = FaultBackend(runs.inner)
    faulty.fail("delete", PermissionError("no"), prefix="refs/")
    with vc.Checkpointer(vc.Store(faulty, exists=False), "run", keep_last=1) as checkpointer:
        checkpointer.save(1, {"w": tensor(1)})
        assert "retain" in checkpointer.save(2, {"w": tensor(2)}).result().seconds
        assert "retention failed: no" in caplog.text
        assert steps(runs.store) == [1, 2]
        checkpointer.save(3, {"w": tensor(3)})
    assert steps(runs.store) == [3]


# ---- C058: completeness was judged differently by file system, and a copy was collected as a temporary


def test_c058_a_copied_store_is_complete_and_loses_nothing(tmp_path):
    runs = Runs()
    for step in range(3):
        runs.save(step, same=0, own=step)
    runs.delete(1)
    runs.gc()

    async def copy(target):
        async for info in runs.inner.list(""):
            await target.put(info.key, [await runs.inner.get(info.key)])

    copies = [LocalBackend(tmp_path / "copy"), LocalBackend(tmp_path / "prefix" / "deeper"), Runs().inner]
    for target in copies:
        loop.run(copy(target))
        store = vc.Store(target, exists=True)
        assert steps(store) == [0, 2]
        for hours in (0, 30, 60, 120):
            store.gc(HOUR, now=time.time() + hours * HOUR)
            for step in (0, 2):
                assert store[f"run@{step}"].verify().ok
                assert torch.equal(store[f"run@{step}"].read("own"), tensor(step))
        store.close()


# ---- C072: an object that was put after the references were traced looked like one that nothing refers to


@pytest.mark.parametrize("at", [0, 3, 5])
def test_c072_a_writer_that_pauses_while_others_collect_publishes_a_whole_snapshot(at):
    runs = Runs()
    runs.save(0, other=9)
    state = {f"t{i}": tensor(i, 1 << 19) for i in range(5)}
    gate = Gate(runs.inner, at, verb="put_if_absent")
    options = vc.SaveOptions(pack_bytes=1 << 20, host_budget_bytes=32 << 20)  # a pack for each of five blocks
    writer = Standing(gate, lambda: vc.Checkpointer(runs.on(gate), "run", options=options).save(1, state).result())
    assert writer.stands
    for _ in range(3):
        assert runs.gc().collection.done.deleted.num == 0
        runs.hours += 0.16  # less than half the grace period in all
    assert writer.finish().packs >= 5
    runs.hours += 5
    runs.gc()
    snapshot = runs.store["run@1"]
    assert snapshot.verify().ok
    for name, value in state.items():
        assert torch.equal(snapshot.read(name), value)


@pytest.mark.parametrize("at", range(12))
def test_c072_a_collection_that_pauses_anywhere_beside_saves_deletes_nothing_that_they_use(at):
    runs = Runs()
    runs.save(1, same=0, own=1)
    runs.save(2, same=0, own=2)
    runs.delete(1)
    runs.hours += 2
    runs.gc()
    runs.hours += 1
    gate = Gate(runs.inner, at)
    collecting = Standing(gate, lambda: runs.gc(store=runs.on(gate)))
    runs.save(3, same=0, own=1)  # what it is about to delete
    runs.delete(2)
    collecting.finish()
    runs.check()
    runs.save(4, same=0, own=1, more=3)
    runs.collect_all()
    runs.check()
    assert runs.stored() == runs.needed()


# ---- C074: an interrupted prune stopped the next one, or starved saves


@pytest.mark.parametrize("gone", [False, True])
def test_c074_after_any_interruption_collection_converges_also_past_what_is_gone_already(gone):
    at = 0
    while True:
        runs = Runs()
        for step in range(4):
            runs.save(step, same=0, own=step)
        for step in range(3):
            runs.delete(step)
        runs.hours += 2
        runs.gc()
        runs.hours += 1
        dying = FaultBackend(runs.inner, kill_at=at, kill_when=When.AFTER)
        try:
            runs.gc(store=runs.on(dying))
            break
        except SimulatedCrash:
            pass
        if gone:
            for key in runs.keys("packs/"):
                if key.rpartition("/")[2] not in runs.needed():
                    loop.run(runs.inner.delete(key))
        runs.check()
        runs.save(9, same=0, own=9)
        runs.collect_all()
        runs.check()
        assert runs.stored() == runs.needed()
        assert runs.keys("gc/") == []
        at += 1
    assert at > 10


# ---- C076: retention took the newest


def keep(numbers, keep_last, *, tag=None):
    """Save these steps in this order and return what is left of them."""
    runs = Runs()
    with vc.Checkpointer(runs.store, "run", keep_last=keep_last) as checkpointer:
        for number in numbers:
            checkpointer.save(number, {"w": tensor(number)})
            assert number in steps(runs.store), "nothing just written is pruned"
            if number == tag:
                runs.store.tag("run", number, "best")
    for step in steps(runs.store):
        assert torch.equal(runs.store[f"run@{step}"].read("w"), tensor(step))
    return steps(runs.store)


def test_c076_numbers_are_compared_as_numbers():
    assert keep(range(9000, 10001, 100), 10) == list(range(9100, 10001, 100))


def test_c076_a_run_that_begins_again_below_old_steps_keeps_what_it_saves():
    assert keep([500, 600, 700, 100], 3) == [100, 500, 600, 700]
    assert keep([500, 600, 700, 100, 200, 300], 3) == [100, 200, 300, 500, 600, 700]


def test_c076_one_is_enough_and_the_best_stays_with_the_last():
    assert keep([1, 2, 3, 10], 1) == [10]
    assert keep([1, 2, 3, 4], 1, tag=2) == [2, 4]


# ---- C078: a purge beside a save hit the step in flight, or took the latest one


@pytest.mark.parametrize("prefix", ["packs/", "manifests/", "refs/"])
def test_c078_a_purge_beside_a_save_touches_neither_that_nor_the_latest_one(prefix):
    runs = Runs()
    runs.save(1, same=0, own=1)
    runs.save(2, same=0, own=2)
    gate = Gate(runs.inner, 0, verb="put_if_absent", prefix=prefix)
    saving = Standing(gate, lambda: runs.save(3, store=runs.on(gate), same=0, own=3))
    pruned = runs.store.prune("run", vc.RetentionPolicy(keep_last=1))
    assert (pruned.deleted, [each.step for each in pruned.plan.kept]) == ((1,), [2])
    runs.gc()
    saving.finish()
    del runs.saved["run", 1]
    runs.check()


def test_c078_what_is_incomplete_does_not_count_and_a_zero_retention_is_refused():
    runs = Runs()
    runs.save(1, own=1)
    dying = FaultBackend(runs.inner)
    dying.fail("put_if_absent", SimulatedCrash("here"), prefix="refs/")
    with pytest.raises(SimulatedCrash):
        runs.save(2, store=runs.on(dying), own=2)
    assert runs.store.prune("run", vc.RetentionPolicy(keep_last=1)).deleted == ()
    runs.check()
    with pytest.raises(vc.errors.ConfigError):
        vc.RetentionPolicy(keep_last=0)
    with pytest.raises(vc.errors.ConfigError):
        vc.Checkpointer(runs.store, "run", keep_last=0)
    with pytest.raises(vc.errors.ConfigError):
        vc.Checkpointer(runs.store, "run", keep_every=10)


# ---- C138: the cost of a collection grew with all objects


def test_c138_a_collection_asks_for_lists_and_not_for_objects():
    runs = Runs()
    for step in range(3):
        runs.save(step, same=0, own=step)
    for number in range(2000):
        loop.run(runs.inner.put(f"packs/{number % 256:02x}/{number % 256:02x}{number:062x}", [b"x"]))
    counted = CountingBackend(runs.inner)
    report = runs.store.__class__(counted, exists=True).gc(HOUR, now=runs.now)
    assert report.collection.plan.young.num == 2000
    asked = counted.counts.requests
    # store.json (asked twice); a ref and a manifest for each of three snapshots
    assert (asked["list"], asked["head"], asked["get_into"], asked["get"]) == (7, 1, 4, 3)
    assert asked.keys() <= {"list", "head", "get_into", "get", "leftovers"}
    assert report.collection.done.seconds > 0
