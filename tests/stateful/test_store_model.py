"""A store against a dictionary: saves, loads, tags, deletions, pruning, collection, death and retries, in any order.

Time is the test's: a collection is told what time it is, so that days pass in a moment. A save and a collection may
also stand still at any of their operations while others are at work, for as long as the grace period allows.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import vescale_ckpt as vc
from tests.faults.gate import Gate, Standing
from vescale_ckpt.collecting.gc import packs_of
from vescale_ckpt.errors import ConflictError, SnapshotNotFoundError
from vescale_storage import loop, refs
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import manifest_key
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash, When

HOUR = 3600.0
GRACE = HOUR
SAVE_STANDS_HOURS = 0.7
"""A save may take half the grace period by the rules; more is allowed here, for there is a margin."""
GC_STANDS_HOURS = 0.2
"""A mark is put at most a quarter of the grace period after the time that it bears."""

NAMES = ("w", "v", "u")
RUNS = st.sampled_from(["a", "b b"])
PLACES = st.sampled_from([(run, step) for step in (10, 9, 100, 0, 1, 7) for run in ("a", "b b")])
STATES = st.integers(0, 5 ** len(NAMES) - 2)
"""Which values each tensor has, or that it is not there. Few, so that content is shared and comes back."""
TAGS = st.sampled_from(["best", "x y"])
AT = st.integers(0, 30)
WHICH = st.integers(0, 11)
WHEN = st.sampled_from(list(When))

Key = tuple[str, int] | tuple[str, str]

COUNTS: Counter[str] = Counter()
"""What was done, over all examples."""


def seeds_of(number: int) -> dict[str, int]:
    """Return a state's tensors by their values; at least one is there."""
    digits = [number // 5**place % 5 for place in range(len(NAMES))]
    return {name: digit for name, digit in zip(NAMES, digits, strict=True) if digit < 4}


def state_of(seeds: dict[str, int]) -> dict[str, torch.Tensor]:
    return {name: torch.arange(4, dtype=torch.int64) + 10 * seed for name, seed in seeds.items()}


def one_of(table: dict[Key, object], which: int) -> Key:
    """Return a key of ``table``."""
    names = sorted(table)
    return names[which % len(names)]


class StoreMachine(RuleBasedStateMachine):
    """The store, and beside it what it should hold.

    A thread that stands at its 17th operation may have done another 17 when the same steps are run again, so nothing
    that is drawn depends on what the store holds: no rule has a precondition.
    """

    @initialize(states=st.lists(st.tuples(PLACES, STATES), min_size=2, max_size=4))
    def begin(self, states) -> None:
        self.inner = MemoryBackend(uuid.uuid4().hex)
        self.store = vc.Store(self.inner, exists=False)
        self.store.require(create=True)
        self.writers = {
            run: vc.Checkpointer(self.store, run, options=vc.SaveOptions(dedup_across_runs=run == "b b"))
            for run in ("a", "b b")
        }
        self.snapshots: dict[tuple[str, int], dict[str, int]] = {}
        self.tagged: dict[tuple[str, str], tuple[int, dict[str, int]]] = {}
        self.hours = 0.0
        self.saving: Standing | None = None
        self.saving_what: tuple[str, int, dict[str, int]] = ("", 0, {})
        self.saving_is_committed = False
        """It may stand after its commit, too."""
        self.collecting: Standing | None = None
        self.room_hours = 1e9
        """How far time may go on before what stands must have ended."""
        self.deleted_meanwhile: set[tuple[str, int]] = set()
        for place, state in states:
            self.save(place, state, None)

    # ---- helpers

    @property
    def now(self) -> float:
        return time.time() + self.hours * HOUR

    def over(self, backend) -> vc.Store:
        return vc.Store(backend, exists=True)

    def newest(self, run: str, step: int) -> refs.Ref | None:
        try:
            return loop.run(refs.read_ref(self.inner, run, step))
        except refs.RefNotFoundError:
            return None

    def check(self, name: str, seeds: dict[str, int]) -> None:
        found = self.store[name].state_dict()
        expected = state_of(seeds)
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key)

    def forget(self, run: str, step: int) -> None:
        del self.snapshots[run, step]
        self.deleted_meanwhile.add((run, step))

    def tags_of(self, run: str, step: int) -> list[str]:
        return [name for (tag_run, name), (tagged, _) in self.tagged.items() if (tag_run, tagged) == (run, step)]

    def steps(self, run: str) -> set[int]:
        return {key.step for key in loop.run(refs.list_ref_keys(self.inner, run))}

    def packs(self) -> tuple[set[str], set[str]]:
        """Return the packs that are stored, and those that refs and tags lead to."""

        async def look():
            stored = {info.key.rpartition("/")[2] async for info in self.inner.list("packs/")}
            held = [ref for run in ("a", "b b") for ref in await refs.list_refs(self.inner, run, all_versions=True)]
            held += [tag.ref for run in ("a", "b b") for tag in await refs.list_tags(self.inner, run)]
            manifests = [await self.inner.get(manifest_key(name)) for name in {ref.manifest for ref in held}]
            return stored, {pack for data in manifests for pack in packs_of(data)}

        return loop.run(look())

    # ---- saves

    @rule(place=PLACES, state=STATES, base=st.none() | PLACES)
    def save(self, place, state, base):
        run, step = place
        name = "{}@{}".format(*base) if base in self.snapshots else None
        self.writers[run].save(step, state_of(seeds_of(state)), base=name)
        self.snapshots[place] = seeds_of(state)

    @rule(place=PLACES, state=STATES, at=AT, when=WHEN)
    def save_and_die(self, place, state, at, when):
        (run, step), seeds = place, seeds_of(state)
        before = self.newest(run, step)
        backend = FaultBackend(self.inner, kill_at=at, kill_when=when)
        writer = vc.Checkpointer(self.over(backend), run, options=vc.SaveOptions(dedup_across_runs=run == "b b"))
        with contextlib.suppress(SimulatedCrash):
            writer.save(step, state_of(seeds))
        with contextlib.suppress(SimulatedCrash):
            writer.close()
        COUNTS["died in a save"] += backend.dead
        after = self.newest(run, step)
        if after != before:
            assert before is None or after.version > before.version
            self.snapshots[run, step] = seeds
        if after is not None:
            self.check(f"{run}@{step}", self.snapshots[run, step])

    @rule(place=PLACES, state=STATES, at=AT)
    def begin_a_save(self, place, state, at):
        if self.saving is not None:
            self.end_the_save()
        (run, step), seeds = place, seeds_of(state)
        before = self.newest(run, step)
        gate = Gate(self.inner, at)

        def work():
            with vc.Checkpointer(self.over(gate), run) as writer:
                return writer.save(step, state_of(seeds)).result()

        self.saving, self.saving_what = Standing(gate, work), (run, step, seeds)
        COUNTS["stood in a save"] += self.saving.stands
        self.saving_is_committed = self.newest(run, step) != before
        if self.saving_is_committed:
            self.snapshots[run, step] = seeds
        if self.saving.stands:
            self.room_hours = min(self.room_hours, SAVE_STANDS_HOURS)
        else:
            self.end_the_save()

    @rule()
    def end_the_save(self):
        if self.saving is None:
            return
        self.saving.finish()
        run, step, seeds = self.saving_what
        if not self.saving_is_committed:
            self.snapshots[run, step] = seeds
            self.check(f"{run}@{step}", seeds)
        self.saving = None
        self.room_hours = 1e9 if self.collecting is None else min(self.room_hours, GC_STANDS_HOURS)

    # ---- loads

    @rule(which=WHICH)
    def load(self, which):
        if not self.snapshots:
            return
        run, step = one_of(self.snapshots, which)
        self.check(f"{run}@{step}", self.snapshots[run, step])

    @rule(which=WHICH)
    def load_in_place(self, which):
        if not self.snapshots:
            return
        run, step = one_of(self.snapshots, which)
        seeds = self.snapshots[run, step]
        target = {name: torch.zeros(4, dtype=torch.int64) for name in seeds}
        self.writers[run].load(target, step)
        for name, value in state_of(seeds).items():
            assert torch.equal(target[name], value)

    @rule(run=RUNS)
    def load_the_newest(self, run):
        steps = [step for snapshot_run, step in self.snapshots if snapshot_run == run]
        if steps:
            self.check(run, self.snapshots[run, max(steps)])
        else:
            with pytest.raises(SnapshotNotFoundError):
                self.store[run]

    @rule(which=WHICH)
    def load_a_tag(self, which):
        if not self.tagged:
            return
        run, name = one_of(self.tagged, which)
        self.check(f"{run}@{name}", self.tagged[run, name][1])

    # ---- tags, deletion, pruning

    @rule(place=PLACES, name=TAGS)
    def tag(self, place, name):
        run, step = place
        if (run, step) not in self.snapshots:
            with pytest.raises(SnapshotNotFoundError):
                self.store.tag(run, step, name)
        elif (run, name) in self.tagged:
            with contextlib.suppress(ConflictError):  # it is there already, on the same version
                self.store.tag(run, step, name)
                assert self.tagged[run, name] == (step, self.snapshots[run, step])
        else:
            self.store.tag(run, step, name)
            self.tagged[run, name] = (step, self.snapshots[run, step])

    @rule(run=RUNS, name=TAGS)
    def untag(self, run, name):
        if self.tagged.pop((run, name), None) is not None:
            self.store.untag(run, name)
        else:
            with pytest.raises(SnapshotNotFoundError):
                self.store.untag(run, name)

    @rule(place=PLACES)
    def delete(self, place):
        run, step = place
        if (run, step) not in self.snapshots:
            with pytest.raises(SnapshotNotFoundError):
                self.store.delete(run, step)
        elif self.tags_of(run, step):
            with pytest.raises(ConflictError):
                self.store.delete(run, step)
        else:
            self.store.delete(run, step)
            self.forget(run, step)

    @rule(
        run=RUNS,
        keep_last=st.integers(1, 4),
        keep_every=st.none() | st.sampled_from([2, 5, 10]),
        kill_at=st.none() | AT,
    )
    def prune(self, run, keep_last, keep_every, kill_at):
        steps = sorted(step for snapshot_run, step in self.snapshots if snapshot_run == run)
        when = {step: self.newest(run, step).created_seconds for step in steps}
        kept = set(steps[-keep_last:]) | set(sorted(steps, key=lambda step: (when[step], step))[-keep_last:])
        kept |= {step for step in steps if self.tags_of(run, step) or (keep_every and step % keep_every == 0)}
        backend = FaultBackend(self.inner, kill_at=kill_at)
        policy = vc.RetentionPolicy(keep_last=keep_last, keep_every=keep_every)
        with contextlib.suppress(SimulatedCrash, SnapshotNotFoundError):
            self.over(backend).prune(run, policy, now=self.now)
        left = self.steps(run)
        assert kept <= left <= set(steps)
        assert backend.dead or left == kept
        for step in set(steps) - left:
            self.forget(run, step)

    # ---- collection and time

    @rule(repack=st.booleans())
    def collect(self, repack):
        self.store.gc(GRACE, now=self.now, repack=repack)

    @rule(repack=st.booleans())
    def collect_alone_and_at_once(self, repack):
        self.end_the_save()
        self.end_the_collection()
        self.store.gc(0, now=self.now, repack=repack)
        stored, needed = self.packs()
        assert stored == needed

    @rule(at=AT, when=WHEN, repack=st.booleans())
    def collect_and_die(self, at, when, repack):
        backend = FaultBackend(self.inner, kill_at=at, kill_when=when)
        with contextlib.suppress(SimulatedCrash):
            self.over(backend).gc(GRACE, now=self.now, repack=repack)
        COUNTS["died in a collection"] += backend.dead

    @rule(at=AT, repack=st.booleans())
    def begin_a_collection(self, at, repack):
        if self.collecting is not None:
            self.end_the_collection()
        gate = Gate(self.inner, at)
        self.deleted_meanwhile.clear()
        now = self.now
        self.collecting = Standing(gate, lambda: self.over(gate).gc(GRACE, now=now, repack=repack))
        COUNTS["stood in a collection"] += self.collecting.stands
        if self.collecting.stands:
            self.room_hours = min(self.room_hours, GC_STANDS_HOURS)
        else:
            self.end_the_collection()

    @rule()
    def end_the_collection(self):
        if self.collecting is None:
            return
        self.collecting.finish()
        self.collecting = None
        self.room_hours = 1e9 if self.saving is None else self.room_hours
        for run in ("a", "b b"):
            known = {step for snapshot_run, step in self.snapshots if snapshot_run == run}
            for step in self.steps(run) - known:  # deleted while it was being repacked: it may come back
                if self.saving is None or (run, step) != self.saving_what[:2]:
                    assert (run, step) in self.deleted_meanwhile
                    self.store.delete(run, step)

    @rule(hours=st.sampled_from([0.05, 0.3, 1.1, 2.5]))
    def wait(self, hours):
        hours = min(hours, self.room_hours)
        self.hours += hours
        self.room_hours -= hours

    # ---- always

    @invariant()
    def count(self):
        COUNTS["steps"] += 1

    def teardown(self):
        if not hasattr(self, "store"):
            return
        if self.saving is not None:
            self.end_the_save()
        if self.collecting is not None:
            self.end_the_collection()
        for _ in range(2):
            self.hours += 3
            self.store.gc(GRACE, now=self.now)
        stored, needed = self.packs()
        assert stored == needed
        for run in ("a", "b b"):
            assert self.steps(run) == {step for snapshot_run, step in self.snapshots if snapshot_run == run}
        for (run, step), seeds in self.snapshots.items():
            self.check(f"{run}@{step}", seeds)
        for (run, name), (_, seeds) in self.tagged.items():
            self.check(f"{run}@{name}", seeds)
        for writer in self.writers.values():
            writer.close()


@pytest.mark.timeout(600)
def test_the_store_is_the_dictionary():
    COUNTS.clear()
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=130,
            stateful_step_count=200,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    print(dict(COUNTS))
    assert COUNTS["steps"] > 10_000
    for what in ("died in a save", "died in a collection", "stood in a save", "stood in a collection"):
        assert COUNTS[what] > 100, COUNTS
