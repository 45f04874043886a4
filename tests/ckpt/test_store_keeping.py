"""What stays in a store and what goes: tags, deletion, pruning and collection by the store's own methods."""

from __future__ import annotations

import time
import uuid

import pytest
import torch

import vescale_ckpt as vc
from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.errors import ConfigError, ConflictError, SnapshotNotFoundError, StoreNotFoundError

HOUR = 3600.0


def store_with(*steps: int, url: str | None = None, run: str = "run", **options) -> vc.Store:
    store = vc.open_store(url or f"memory://{uuid.uuid4().hex}", **options)
    with vc.Checkpointer(store, run) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": torch.full((1000,), float(step)), "same": torch.arange(100)})
    return store


def steps(store: vc.Store, run: str = "run") -> list[int]:
    return [info.step for info in store.snapshots(run)]


def test_tags_are_set_listed_and_taken_away():
    store = store_with(1, 2)
    before = time.time()
    made = store.tag("run", 1, "best")
    assert (made.run, made.name, made.step, made.version) == ("run", "best", 1, 1)
    assert before <= made.created_seconds <= time.time()
    assert store.tag("run", 1, "best") == made, "the same again changes nothing"
    store.tag("run", 2, "another")
    assert [tag.name for tag in store.tags("run")] == ["another", "best"]
    assert store["run@best"].step == 1
    assert store.snapshots("run")[0].tags == ("best",)
    with pytest.raises(ConflictError, match="do not move"):
        store.tag("run", 2, "best")
    store.untag("run", "best")
    assert [tag.name for tag in store.tags("run")] == ["another"]
    assert store.tags("no such run") == []


def test_what_cannot_be_tagged_or_untagged_is_told():
    store = store_with(1)
    with pytest.raises(SnapshotNotFoundError, match="the run has the steps 1"):
        store.tag("run", 2, "best")
    with pytest.raises(SnapshotNotFoundError, match="no such tag"):
        store.untag("run", "best")
    for name in ("12", "a/b", ""):
        with pytest.raises(ConfigError):
            store.tag("run", 1, name)


def test_snapshots_are_deleted_unless_they_are_tagged():
    store = store_with(1, 2, 3)
    store.tag("run", 2, "best")
    assert store.delete("run", 1, dry_run=True).num_versions == 1
    assert store.delete("run", 1).step == 1
    with pytest.raises(ConflictError, match="best"):
        store.delete("run", 2)
    with pytest.raises(SnapshotNotFoundError):
        store.delete("run", 1)
    assert steps(store) == [2, 3]


def test_pruning_by_a_policy():
    store = store_with(*range(0, 60, 10))
    policy = vc.RetentionPolicy(keep_last=2, keep_every=20)
    dry = store.prune("run", policy, dry_run=True, keep_steps=(10,))
    assert dry.plan.deleted == (30,)
    assert steps(store) == [0, 10, 20, 30, 40, 50]
    assert store.prune("run", policy).deleted == (10, 30)
    assert steps(store) == [0, 20, 40, 50]
    with pytest.raises(SnapshotNotFoundError, match="its runs are 'run'"):
        store.prune("rnu", policy)


@pytest.mark.parametrize("place", ["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def test_space_comes_back_on_every_back_end(place, tmp_path, request):
    url, options = f"memory://{uuid.uuid4().hex}", {}
    if place == "local":
        url = str(tmp_path / "store")
    elif place == "s3":
        found = request.getfixturevalue("s3_url")
        url, options = found.url, {"storage_options": found.storage_options}
    store = store_with(*range(4), url=url, **options)
    request.addfinalizer(store.close)
    for step in range(3):
        store.delete("run", step)
    told = []
    first = store.gc(dry_run=True).collection
    assert (first.plan.young.num, first.plan.deletable.num) == (5, 0), "the first pack has what all share"
    assert store.gc().collection.done.marked.num == 0, "too young for the default"
    marked = store.gc(HOUR, now=time.time() + 2 * HOUR).collection.done
    assert (marked.marked.num, marked.deleted.num) == (5, 0)
    done = store.gc(HOUR, now=time.time() + 4 * HOUR, progress=lambda *what: told.append(what)).collection.done
    assert (done.packs.num, done.manifests.num, done.hints.num) == (2, 3, 0)
    assert told[-1] == ("objects deleted", 5)
    if place == "s3":
        time.sleep(1.1)  # its clock counts whole seconds, and what is of this second is young
    repacked = store.gc(0, repack=True)
    assert repacked.repacked.snapshots == ("run@3",)
    assert repacked.collection.done.packs.num == 1
    assert store["run@3"].verify().ok
    assert torch.equal(store["run@3"].read("w"), torch.full((1000,), 3.0))
    assert torch.equal(store["run@3"].read("same"), torch.arange(100))


def test_nothing_is_made_where_there_is_no_store():
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    for call in (store.gc, lambda: store.tags("run"), lambda: store.prune("run", vc.RetentionPolicy(keep_last=1))):
        with pytest.raises(StoreNotFoundError):
            call()


def test_a_checkpointer_keeps_what_it_is_told_and_only_in_its_run():
    store = store_with(1, 2, 3, run="other")
    with vc.Checkpointer(store, "run", keep_last=2, keep_every=4) as checkpointer:
        for step in range(10):
            report = checkpointer.save(step, {"w": torch.full((100,), float(step))}).result()
            assert report.seconds["retain"] > 0
            if step == 5:
                store.tag("run", 5, "best")
    assert steps(store) == [0, 4, 5, 8, 9]
    assert steps(store, "other") == [1, 2, 3]


def test_one_rank_of_several_prunes():
    store = store_with(1, 2)
    seconds = []

    def body(group):
        checkpointer = vc.Checkpointer(store, "run", keep_last=1)
        checkpointer._group_made = group
        with checkpointer:
            handles = [checkpointer.save(step, {"w": torch.zeros(10)}, blocking=False) for step in (3, 4)]
            seconds.extend(handle.result().seconds for handle in handles)

    all_well(run_ranks(3, body))
    assert steps(store) == [4]
    assert sum("retain" in each for each in seconds) == 2
