from __future__ import annotations

import uuid

import pytest

from vescale_ckpt.errors import AccessDeniedError, ConflictError, CorruptionError, SnapshotNotFoundError
from vescale_ckpt.pruning import delete_snapshot, prune_run
from vescale_ckpt.retention import RetentionPolicy
from vescale_storage import loop, refs
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import ref_key, tag_key
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash

MANIFEST = "ab" * 32


def store(*steps: int, run: str = "run") -> MemoryBackend:
    backend = MemoryBackend(uuid.uuid4().hex)
    for place, step in enumerate(steps):
        commit(backend, step, place, run)
    return backend


def commit(backend, step, place, run="run"):
    loop.run(refs.create_ref(backend, run, step, manifest=MANIFEST, transaction=f"{place:032x}", now=1000.0 + place))


def prune(backend, keep_last=1, now=2000.0, **options):
    return loop.run(prune_run(backend, "run", RetentionPolicy(keep_last=keep_last), now=now, **options))


def left(backend, run="run") -> list[int]:
    return [ref.step for ref in loop.run(refs.list_refs(backend, run))]


def test_deleting_takes_all_versions_and_nothing_else():
    backend = store(5, 5, 7)
    assert loop.run(delete_snapshot(backend, "run", 5, dry_run=True)).num_versions == 2
    assert left(backend) == [5, 7]
    deleted = loop.run(delete_snapshot(backend, "run", 5, dry_run=False))
    assert (deleted.run, deleted.step, deleted.num_versions, deleted.dry_run) == ("run", 5, 2, False)
    assert left(backend) == [7]
    with pytest.raises(SnapshotNotFoundError, match="no such snapshot"):
        loop.run(delete_snapshot(backend, "run", 5, dry_run=True))


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_tagged_snapshot_is_not_deleted(dry_run):
    backend = store(5)
    loop.run(refs.set_tag(backend, "run", "best", 5, now=1.0))
    with pytest.raises(ConflictError, match="tagged best"):
        loop.run(delete_snapshot(backend, "run", 5, dry_run=dry_run))
    assert left(backend) == [5]


def test_a_tag_that_comes_between_the_look_and_the_deletion_protects_too():
    backend = store(5)

    class Tagging(FaultBackend):
        async def list(self, prefix):
            if prefix.endswith("/tags/") and not self.dead:
                self.dead = True
                await refs.set_tag(self.inner, "run", "best", 5, now=1.0)
                self.dead = False
            async for info in self.inner.list(prefix):
                yield info

    with pytest.raises(ConflictError, match="tagged best"):
        loop.run(delete_snapshot(Tagging(backend), "run", 5, dry_run=False))
    assert left(backend) == [5]
    commit(backend, 7, 7)
    commit(backend, 9, 9)
    loop.run(backend.delete(tag_key("run", "best")))
    pruned = prune(Tagging(backend))
    assert (pruned.deleted, pruned.spared) == ((7,), (5,))


def test_pruning_does_what_its_plan_says():
    backend = store(*range(10))
    told = []
    dry = prune(backend, 3, dry_run=True)
    assert (dry.plan.deleted, dry.deleted, dry.dry_run) == (tuple(range(7)), (), True)
    assert left(backend) == list(range(10))
    pruned = prune(backend, 3, progress=lambda what, num: told.append((what, num)))
    assert pruned.plan == dry.plan
    assert pruned.deleted == tuple(range(7))
    assert left(backend) == [7, 8, 9]
    assert told == [("snapshots deleted", num) for num in range(1, 8)]
    assert prune(backend, 3).deleted == ()


def test_other_runs_are_neither_counted_nor_touched():
    backend = store(1, 2, 3)
    for place, step in enumerate((100, 200, 300)):
        commit(backend, step, place, "run 2")
    assert prune(backend, 2).deleted == (1,)
    assert left(backend, "run 2") == [100, 200, 300]


def test_what_is_not_committed_neither_counts_nor_goes():
    """A newer save under way is a fragment and packs: no snapshot."""
    backend = store(1)
    loop.run(backend.put(f"txn/{'1' * 32}/rank-0", [b"fragment"]))
    loop.run(backend.put("packs/aa/" + "aa" * 32, [b"pack"]))
    assert prune(backend).deleted == ()
    assert left(backend) == [1]
    assert loop.run(backend.head(f"txn/{'1' * 32}/rank-0")).size_bytes == 8


def test_a_step_that_is_saved_again_while_it_is_pruned_keeps_what_was_saved():
    backend = store(1, 2)

    class Saving(FaultBackend):
        async def delete(self, key):
            if not self.dead:
                self.dead = True
                await refs.create_ref(self.inner, "run", 1, manifest=MANIFEST, transaction="f" * 32, now=1.0)
            await self.inner.delete(key)

    prune(Saving(backend))
    assert loop.run(refs.read_ref(backend, "run", 1)).transaction == "f" * 32


def test_superseded_versions_go_after_an_hour():
    backend = store(1, 1, 1)
    assert prune(backend, now=2000.0).num_superseded == 0
    assert prune(backend, now=1002.0 + 3600).num_superseded == 2
    assert loop.run(refs.read_ref(backend, "run", 1)).version == 3
    assert len(loop.run(refs.list_ref_keys(backend, "run"))) == 1


def test_a_damaged_tag_stops_it():
    backend = store(1, 2, 3)
    tag = loop.run(refs.set_tag(backend, "run", "best", 1, now=1.0))
    loop.run(backend.put(tag.key, [b"damage"]))
    with pytest.raises(CorruptionError):
        prune(backend)
    assert left(backend) == [1, 2, 3]


def test_a_ref_is_read_once_over_many_prunings():
    backend = CountingBackend(store(*range(5)))
    known: dict[str, float] = {}
    prune(backend, 9, known=known)
    assert set(known) == {ref_key("run", step, 1) for step in range(5)}
    before = backend.counts
    prune(backend, 9, known=known)
    assert (backend.counts - before).requests == {"list": 1}


def test_killed_at_any_deletion_the_next_pruning_finishes():
    at = 0
    while True:
        inner = store(1, 1, 2, 2, 3)
        backend = FaultBackend(inner, kill_at=at)
        try:
            prune(backend)
            break
        except SimulatedCrash:
            pass
        assert left(inner)[-1] == 3
        for step in left(inner):
            assert loop.run(refs.read_ref(inner, "run", step)).version == {1: 2, 2: 2, 3: 1}[step], "never an older one"
        prune(inner)
        assert left(inner) == [3]
        at += 1
    assert at > 8


def test_permission_that_is_lost_is_an_error():
    backend = FaultBackend(store(1, 2))
    backend.fail("delete", AccessDeniedError("no"))
    with pytest.raises(AccessDeniedError):
        prune(backend)
