from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.storage.collect.miniature import DAY, HOUR, World, name, packs_of
from vescale_storage import loop, refs
from vescale_storage.backends.local import LocalBackend
from vescale_storage.collect.marks import decode_mark, parse_gc_key, sweep_key
from vescale_storage.collect.plan import Tally
from vescale_storage.collect.roots import RootReader
from vescale_storage.collect.sweep import Collector, storage_clock
from vescale_storage.errors import AccessDeniedError, ConfigError, CorruptionError
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash, When
from vescale_storage.wrappers.wrapper import WrapperBackend


def aged(*, dead=("dead",), live=("live",)) -> World:
    """Return a store with a committed step, packs of a deleted one, and all of it a day old."""
    world = World()
    world.commit(1, *dead, *live)
    loop.run(refs.delete_ref(world.backend, "run", 1))
    world.commit(2, *live)
    world.now += DAY
    return world


# ---- the two phases


def test_a_first_collection_marks_and_one_after_the_grace_period_deletes():
    world = aged()
    first = world.collect()
    assert (first.done.marked.num, first.done.deleted) == (2, Tally())
    assert world.has("dead", "live") == [True, True]
    (key,) = world.keys("gc/")
    mark = decode_mark(loop.run(world.backend.get(key)), key)
    assert mark.packs == {name("dead")}
    assert (mark.created_seconds, mark.grace_seconds) == (world.now, HOUR)

    world.now += HOUR - 1
    again = world.collect()
    assert (again.plan.waiting.num, again.done.marked, again.done.deleted) == (2, Tally(), Tally())
    assert again.plan.next_due_seconds == world.now + 1

    world.now += 1
    second = world.collect()
    assert (second.done.packs.num, second.done.manifests.num) == (1, 1)
    assert world.has("dead", "live") == [False, True]
    assert [parse_gc_key(key).kind for key in world.keys("gc/")] == ["mark", "sweep"]

    world.now += 2 * HOUR
    world.collect()
    assert world.keys("gc/") == []
    assert world.collect().plan.is_empty


def test_a_weekly_collection_comes_to_the_same():
    world = aged()
    for _ in range(3):
        world.collect(grace=DAY)
        world.now += 7 * DAY
    assert world.has("dead", "live") == [False, True]
    assert world.keys("gc/") == []


def test_a_dry_run_says_it_and_writes_nothing():
    world = aged()
    backend = CountingBackend(world.backend)
    before = world.keys()
    found = world.collect(backend=backend, dry_run=True)
    assert found.dry_run
    assert [each.kind for each in found.plan.to_mark] == ["pack", "manifest"]
    assert set(backend.counts.requests) <= {"list", "get", "get_into", "leftovers"}
    assert world.keys() == before
    world.collect()
    world.now += HOUR
    assert world.collect(dry_run=True).plan.deletable.num == 2
    assert world.has("dead") == [True]


def test_without_a_grace_period_all_of_it_happens_at_once_and_nothing_is_left():
    world = aged()
    done = world.collect(grace=0).done
    assert (done.packs.num, done.manifests.num, done.marked.num) == (1, 1, 2)
    assert world.has("dead", "live") == [False, True]
    assert world.keys("gc/") == []


def test_what_is_needed_again_when_its_time_has_come_stays():
    world = aged()
    world.collect()
    world.commit(3, "dead")  # by a save that began before the mark was there
    world.now += HOUR
    assert world.collect().done.packs == Tally()
    assert world.has("dead") == [True]
    loop.run(refs.delete_ref(world.backend, "run", 3))
    world.now += DAY
    world.collect()
    world.now += HOUR
    world.collect()
    assert world.has("dead") == [False], "marked anew"


def test_what_was_put_over_it_meanwhile_stays():
    world = aged()
    world.collect()
    world.now += HOUR - 1
    world.pack("dead")
    world.now += 1
    world.collect()
    assert world.has("dead") == [True]


def test_everything_of_dead_saves_goes():
    world = aged(dead=())
    world.put(f"txn/{'1' * 32}/rank-0")
    world.put("gc/clock-0011223344556677")
    world.now += HOUR
    new = world.put(f"txn/{'2' * 32}/abort-1")
    strange = world.put("txn/readme")
    done = world.collect().done
    assert done.transactions == Tally(1, 4)
    assert world.keys("txn/") == [new, strange]
    assert world.keys("gc/clock") == []


def test_leftovers_of_the_back_end_go_when_they_are_old(tmp_path):
    backend = LocalBackend(tmp_path)
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "0123~packs%2Fx").write_bytes(b"torn")
    now = time.time()
    for at, outcome in ((now, 0), (now + HOUR + 1, 1), (now + 2 * HOUR, 0)):
        collector = Collector(backend, RootReader(backend, lambda _data: []), now=at, grace_seconds=HOUR)
        assert loop.run(collector.collect()).done.leftovers.num == outcome
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_progress_is_told():
    world = aged()
    told = []
    world.collect(grace=0, progress=lambda what, num: told.append((what, num)))
    assert told == [
        ("manifests read", 1),
        ("objects listed", 4),
        ("objects deleted", 1),
        ("objects deleted", 2),
    ]


def test_a_grace_period_that_is_none_is_refused():
    world = World()
    for grace in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="grace period"):
            world.collect(grace=grace)


def test_the_storages_clock_is_asked_without_a_trace():
    world = World()
    assert abs(loop.run(storage_clock(world.backend)) - time.time()) < 60
    assert world.keys() == []


# ---- cost


def test_twenty_thousand_objects_with_nothing_to_delete_cost_a_few_listings():
    world = World()
    packs = [f"{number}" for number in range(20_000)]
    content = world.backend._objects[world.put("x")]
    world.backend._objects.update({pack_key(name(pack)): content for pack in packs})
    world.commit(1, *packs)
    world.now += DAY
    backend = CountingBackend(world.backend)
    began = time.monotonic()
    found = world.collect(backend=backend)
    seconds = time.monotonic() - began
    assert found.plan.live_packs.num == 20_000
    assert found.plan.is_empty
    # gc, refs twice, packs, manifests, index, transactions; the ref and its manifest; temporary files
    assert backend.counts.requests == {"list": 7, "get_into": 1, "get": 1, "leftovers": 1}
    assert found.done.seconds <= seconds < 20

    for number in range(10):
        world.pack(f"dead {number}")
    world.now += DAY
    world.collect()
    world.now += HOUR
    backend = CountingBackend(world.backend)
    found = world.collect(backend=backend)
    assert found.done.packs == Tally(10, 60)
    assert found.plan.live_packs.num == 20_000
    # and the mark, read; its sweep record; a look at the mark; ten deletions
    assert backend.counts.requests == {
        "list": 7, "get_into": 2, "get": 1, "leftovers": 1, "put_if_absent": 1, "head": 1, "delete": 10,
    }  # fmt: skip


# ---- damage


def test_damage_stops_everything_before_anything_is_deleted():
    world = aged()
    world.collect()
    world.now += HOUR
    before = world.keys()
    manifest = next(ref.manifest for ref in loop.run(refs.list_refs(world.backend, "run")))
    data = loop.run(world.backend.get(manifest_key(manifest)))
    loop.run(world.backend.put(manifest_key(manifest), [b"x" + data]))
    with pytest.raises(CorruptionError, match="run@2 needs"):
        world.collect()
    with pytest.raises(CorruptionError, match="run@2 needs"):
        world.collect(grace=0)
    assert world.keys() == before


def test_a_pack_that_is_gone_stops_everything_as_dead_ones_may_hold_its_content():
    world = aged()
    loop.run(world.backend.delete(pack_key(name("live"))))
    with pytest.raises(CorruptionError, match=r"packs of run@2 1 are not there") as caught:
        world.collect(grace=0)
    assert caught.value.context["packs"] == (name("live"),)
    assert world.has("dead") == [True]
    loop.run(refs.delete_ref(world.backend, "run", 2))
    world.collect(grace=0)
    assert world.keys("packs/") == []


class Between(WrapperBackend):
    """Does something right before the first request of a verb and prefix."""

    def __init__(self, inner, verb, prefix, action):
        super().__init__(inner)
        self.waiting = {(verb, prefix): action}

    def _act(self, verb, key):
        for (wanted, prefix), action in list(self.waiting.items()):
            if verb == wanted and key.startswith(prefix):
                del self.waiting[wanted, prefix]
                action()

    async def list(self, prefix):
        self._act("list", prefix)
        async for info in self.inner.list(prefix):
            yield info

    async def head(self, key):
        self._act("head", key)
        return await self.inner.head(key)

    async def put_if_absent(self, key, payload):
        self._act("put_if_absent", key)
        await self.inner.put_if_absent(key, payload)

    async def delete(self, key):
        self._act("delete", key)
        await self.inner.delete(key)


def test_a_pack_that_is_put_during_the_listing_is_not_missing():
    world = aged()
    content = world.backend._objects.pop(pack_key(name("live")))
    late = Between(
        world.backend, "head", "packs/", lambda: world.backend._objects.__setitem__(pack_key(name("live")), content)
    )
    assert world.collect(backend=late).plan.missing == (name("live"),)


def test_a_snapshot_that_goes_with_its_packs_during_the_listing_is_not_missing_them():
    world = aged()
    del world.backend._objects[pack_key(name("live"))]
    ref = loop.run(refs.read_ref(world.backend, "run", 2))
    gone = Between(world.backend, "head", "packs/", lambda: world.backend._objects.pop(ref.key))
    assert world.collect(backend=gone).done.marked.num == 2


# ---- several at once


def test_of_two_collections_one_acts_on_a_mark():
    world = aged()
    world.collect()
    world.now += HOUR
    other = []
    racing = Between(world.backend, "put_if_absent", "gc/sweep-", lambda: other.append(_in_thread(world)))
    mine = world.collect(backend=racing)
    assert other[0].done.deleted.num == 2
    assert mine.done.deleted == Tally()
    assert world.has("dead", "live") == [False, True]


def _in_thread(world):
    """Collect on another loop, as another process would."""
    collector = Collector(world.backend, RootReader(world.backend, packs_of), grace_seconds=HOUR, now=world.now)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, collector.collect()).result()


def test_a_mark_that_is_over_is_not_acted_on_by_one_who_saw_it_before():
    """It stood still for days between its look and its claim, and writers may have used the names again."""
    world = aged()
    world.collect()
    world.now += HOUR

    def meanwhile():
        _in_thread(world)
        world.now += DAY
        _in_thread(world)
        assert world.keys("gc/") == []
        world.pack("dead")

    slow = Between(world.backend, "put_if_absent", "gc/sweep-", meanwhile)
    assert world.collect(backend=slow).done.deleted == Tally()
    assert world.has("dead") == [True]
    assert world.keys("gc/") == []


def test_a_sweep_that_takes_longer_than_the_grace_period_ends_and_the_rest_is_marked_anew(monkeypatch):
    world = aged(dead=[f"dead {i}" for i in range(5)])
    world.collect()
    world.now += HOUR
    monkeypatch.setattr("vescale_storage.collect.sweep._NUM_DELETES", 1)
    shift = 0.0

    def late():
        nonlocal shift
        shift = HOUR

    slow = Between(world.backend, "delete", "packs/", late)
    collector = Collector(slow, RootReader(slow, packs_of), now=world.now,
                          grace_seconds=HOUR)  # fmt: skip

    async def main():
        running = asyncio.get_running_loop()
        real = running.time
        monkeypatch.setattr(running, "time", lambda: real() + shift)
        return await collector.collect()

    done = loop.run(main()).done
    assert (done.packs.num, done.unfinished.num) == (1, 4)
    monkeypatch.undo()
    world.now += DAY
    assert world.collect().done.marked.num == 4
    world.now += HOUR
    assert world.collect().done.packs.num == 4


def test_a_mark_bears_the_time_at_which_writers_could_see_it(monkeypatch):
    world = aged()
    shift = 0.0

    async def main(slow):
        running = asyncio.get_running_loop()
        real = running.time
        monkeypatch.setattr(running, "time", lambda: real() + shift)
        return await Collector(slow, RootReader(slow, packs_of), now=world.now,
                               grace_seconds=HOUR).collect()  # fmt: skip

    def late():
        nonlocal shift
        shift = HOUR / 2

    loop.run(main(Between(world.backend, "list", "packs/", late)))
    monkeypatch.undo()
    (key,) = world.keys("gc/")
    made = decode_mark(loop.run(world.backend.get(key)), key).created_seconds
    assert world.now + HOUR / 2 <= made < world.now + HOUR / 2 + 60


def test_a_damaged_mark_is_never_acted_on_and_goes_in_the_end():
    world = aged()
    world.collect()
    (key,) = world.keys("gc/")
    data = bytearray(loop.run(world.backend.get(key)))
    data[40] ^= 1
    loop.run(world.backend.put(key, [data]))
    world.now += HOUR
    found = world.collect()
    assert found.plan.damaged_marks == (parse_gc_key(key).name,)
    assert found.done.deleted == Tally()
    assert sweep_key(parse_gc_key(key).name) in world.keys("gc/")
    world.now += 2 * HOUR
    world.collect()
    world.now += 2 * HOUR
    world.collect()
    assert world.has("dead", "live") == [False, True]
    assert world.keys(key) == []


# ---- crashes


@pytest.mark.parametrize("grace", [0, HOUR])
@pytest.mark.parametrize("when", list(When))
def test_killed_at_any_operation_it_loses_nothing_live_and_the_next_ones_finish(grace, when):
    at = 0
    while True:
        world = aged(dead=("dead 1", "dead 2"), live=("live 1", "live 2"))
        world.put(f"txn/{'1' * 32}/rank-0")
        if grace:
            world.collect(grace=grace)
            world.pack("dead 3")
            world.now += grace
        backend = FaultBackend(world.backend, kill_at=at, kill_when=when)
        try:
            world.collect(backend=backend, grace=grace)
            assert not backend.dead
            break
        except SimulatedCrash:
            pass
        assert world.has("live 1", "live 2") == [True, True]
        loop.run(RootReader(world.backend, packs_of).read())
        for _ in range(4):
            world.now += 2 * grace + 1
            world.collect(grace=grace)
        assert world.has("dead 1", "dead 2", "dead 3", "live 1", "live 2") == [False] * 3 + [True] * 2
        assert len(world.keys("manifests/")) == 1
        assert world.keys("txn/") == world.keys("gc/") == []
        at += 1
    assert at >= 14


def test_permission_that_is_lost_in_the_middle_is_an_error_and_the_next_collection_goes_on():
    world = aged(dead=("dead 1", "dead 2"))
    backend = FaultBackend(world.backend)
    backend.fail("delete", AccessDeniedError("no"), prefix="packs/")
    with pytest.raises(AccessDeniedError):
        world.collect(backend=backend, grace=0)
    world.now += 1
    world.collect(grace=0)
    assert world.has("dead 1", "dead 2", "live") == [False, False, True]
    assert world.keys("gc/") == []
