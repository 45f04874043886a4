"""Savers, loaders, pruning and collections on one store at the same time, for real: nothing that is needed is lost.

Seconds by ``VESCALE_SOAK_SECONDS``; a few in every test run.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter

import pytest
import torch

import vescale_ckpt as vc
from tests.ckpt.collecting.runs import tensor
from vescale_ckpt.errors import ConflictError, CorruptionError, ObjectNotFoundError, SnapshotNotFoundError

SECONDS = float(os.environ.get("VESCALE_SOAK_SECONDS", "10"))
GRACE_SECONDS = 3.0
"""A save takes some tens of milliseconds here, and may take half of this."""
NUM_SAVERS, NUM_LOADERS = 4, 2


class Together:
    """Threads on one store, until the time is over or one of them has found something wrong."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ends = time.monotonic() + SECONDS
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.saved: dict[tuple[str, int], dict[str, int]] = {}

    def run(self) -> None:
        with vc.open_store(self.url) as store:
            store.require(create=True)
        work = [(self.save, f"run {i}") for i in range(NUM_SAVERS)] + [(self.load, i) for i in range(NUM_LOADERS)]
        work += [(self.collect, 0), (self.collect, 1), (self.prune, 0), (self.thin_out, 0)]
        threads = [threading.Thread(target=self.until_the_end, args=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 120)
            assert not thread.is_alive()
        if self.failures:
            raise self.failures[0]

    def until_the_end(self, body, who) -> None:
        try:
            with vc.open_store(self.url) as store:
                body(store, random.Random(str(who)), who)
        except BaseException as error:  # noqa: BLE001 - raised by the test's own thread
            self.failures.append(error)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.ends and not self.failures

    def save(self, store: vc.Store, dice: random.Random, run: str) -> None:
        """Save steps that share content with one another and with other runs."""
        step = 0
        options = vc.SaveOptions(dedup_across_runs=dice.random() < 0.5)
        with vc.Checkpointer(store, run, keep_last=3, keep_every=10, options=options) as checkpointer:
            while self.goes_on:
                step += dice.choice([0, 1, 1, 1])
                seeds = {name: dice.randrange(4) for name in ("a", "b", "c", "own") if dice.random() < 0.8} or {"a": 0}
                self.saved.pop((run, step), None)
                try:
                    state = {name: tensor(seed) for name, seed in seeds.items()}
                    checkpointer.save(step, state, metadata=seeds)
                except ConflictError:
                    self.counts["saves that took too long"] += 1
                    continue
                self.saved[run, step] = seeds
                self.counts["saves"] += 1
                if dice.random() < 0.05 and not store.tags(run):
                    store.tag(run, step, "best")

    def load(self, store: vc.Store, dice: random.Random, _who: int) -> None:
        """Load what should be there: the newest of a run, or its tag; all of it is verified on the way."""
        while self.goes_on:
            run = f"run {dice.randrange(NUM_SAVERS)}"
            name = dice.choice([run, f"{run}@best"])
            try:
                snapshot = store[name]
                metadata, state = snapshot.metadata, snapshot.state_dict()
            except (SnapshotNotFoundError, ObjectNotFoundError, CorruptionError) as error:
                self.excuse(store, name, error)
                continue
            assert state.keys() == metadata.keys(), name
            for key, seed in metadata.items():
                assert torch.equal(state[key], tensor(seed)), (name, key)
            self.counts["loads"] += 1

    def excuse(self, store: vc.Store, name: str, error: BaseException) -> None:
        """Accept an error of a snapshot that is gone by now; never of one that is there."""
        time.sleep(0.01)
        try:
            report = store[name].verify()
        except SnapshotNotFoundError:
            self.counts["not there yet, or gone"] += 1
            return
        assert report.ok, (name, report.problems, error)
        self.counts["replaced while it was read"] += 1

    def collect(self, store: vc.Store, dice: random.Random, who: int) -> None:
        while self.goes_on:
            report = store.gc(GRACE_SECONDS, repack=who == 0)
            self.counts["deleted"] += report.collection.done.deleted.num
            self.counts["collections"] += 1
            self.counts["rewritten"] += len(report.repacked.snapshots) if report.repacked else 0
            time.sleep(dice.random() * 0.2)

    def thin_out(self, store: vc.Store, _dice: random.Random, _who: int) -> None:
        """Leave packs of which little is needed, and time to rewrite them."""
        step = 100
        with vc.Checkpointer(store, "thin") as checkpointer:
            while self.goes_on:
                seeds = {name: step + place for place, name in enumerate("abcd")}
                for some in (seeds, {"a": seeds["a"]}):
                    checkpointer.save(step, {name: tensor(seed) for name, seed in some.items()}, metadata=some)
                    self.saved["thin", step] = some
                    step += 4
                store.delete("thin", step - 8)
                self.saved.pop(("thin", step - 8))
                time.sleep(min(GRACE_SECONDS * 1.2, max(0.0, self.ends - time.monotonic())))

    def prune(self, store: vc.Store, dice: random.Random, _who: int) -> None:
        while self.goes_on:
            time.sleep(0.05)
            run = f"run {dice.randrange(NUM_SAVERS)}"
            try:
                store.prune(run, vc.RetentionPolicy(keep_last=dice.randint(1, 4)))
                if dice.random() < 0.1:
                    store.untag(run, "best")
            except SnapshotNotFoundError:
                continue
            self.counts["prunings"] += 1


@pytest.mark.parametrize("place", ["memory", "local"])
def test_nothing_that_is_needed_is_lost(place, tmp_path):
    together = Together(f"memory://{tmp_path.name}-{os.getpid()}" if place == "memory" else str(tmp_path / "store"))
    together.run()
    print(dict(together.counts))
    with vc.open_store(together.url) as store:
        for run in store.runs():
            for info in store.snapshots(run):
                report = store[info.name].verify()
                assert report.ok, report.problems
                if (run, info.step) in together.saved:
                    assert store[info.name].metadata == together.saved[run, info.step]
        for tag in (tag for run in store.runs() for tag in store.tags(run)):
            assert store[f"{tag.run}@{tag.name}"].verify().ok
        for _ in range(2):
            store.gc(0)
        plan = store.gc(0, dry_run=True).collection.plan
        assert plan.deletable.num == 0
    assert together.counts["rewritten"] > 0
    assert together.counts["saves"] > 5
    assert together.counts["loads"] > 5
    assert together.counts["collections"] > 2
