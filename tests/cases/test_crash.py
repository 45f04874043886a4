"""C050 to C058: what a death, a full disk or a copy leaves behind."""

from __future__ import annotations

import itertools
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vescale_ckpt as vc
from tests.cases.inputs import same_bits, tagged
from tests.cases.worlds import RUN, all_well, checkpointer, load, memory_store, save, store_on, try_save
from tests.distributed.threads import run_ranks
from vescale_ckpt.errors import (
    CorruptionError,
    NoSpaceError,
    ObjectNotFoundError,
    RankFailureError,
    SnapshotNotFoundError,
    VeScaleError,
)
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.payload import payload_bytes
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash, When
from vescale_storage.wrappers.latency import Latency, LatencyBackend
from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    from vescale_storage.backend import Backend, Payload

WORLD = 2
SHAPE = (6, 50)


def fresh() -> MemoryBackend:
    return MemoryBackend(uuid.uuid4().hex)


def copy_all(source: Backend, target: Backend) -> None:
    async def copy() -> None:
        async for info in source.list(""):
            await target.put(info.key, [await source.get(info.key)])

    loop.run(copy())


def state_at(step: int, rank: int, world_size: int = WORLD) -> dict:
    """Return what a rank saves at a step: every element tells the step."""
    per_rank = SHAPE[0] // world_size
    rows = (tagged(*SHAPE) + 1000 * step)[rank * per_rank : (rank + 1) * per_rank]
    return {
        "w": vc.ShardedView(SHAPE, torch.float32, [((rank * per_rank, 0), rows)]),
        "copy": torch.full((5,), float(step)),
        "step": step,
        "rng": vc.PerRank(100 * step + rank),
    }


def check_whole(store: vc.Store, step: int) -> None:
    """Require that a snapshot holds its own step and nothing else."""
    found = store[f"{RUN}@{step}"].state_dict()
    assert same_bits(found["w"], tagged(*SHAPE) + 1000 * step)
    assert found["copy"].eq(step).all()
    assert found["step"] == step
    assert found["rng"] == {rank: 100 * step + rank for rank in found["rng"]}


@pytest.fixture(scope="module")
def with_step_1() -> MemoryBackend:
    backend = fresh()
    save(store_on(backend), WORLD, lambda rank: state_at(1, rank))
    return backend


def save_step_2(backends: list[Backend], *, deadline_seconds: float, retries: int = 0) -> list[Any]:
    """Save step 2 on two ranks, each through a back end of its own to the same storage."""

    def body(group):
        store = store_on(backends[group.rank], exists=True)
        ckpt = checkpointer(store, group, deadline_seconds=deadline_seconds, retries=retries)
        return ckpt.save(2, state_at(2, group.rank)).result()

    return run_ranks(WORLD, body)


class TestC050KilledAtAnyOperation:
    def operations(self, with_step_1: MemoryBackend) -> list[list[Any]]:
        """Return what each rank asks of storage in a save that goes well."""
        inner = fresh()
        copy_all(with_step_1, inner)
        backends = [FaultBackend(inner) for _ in range(WORLD)]
        all_well(save_step_2(backends, deadline_seconds=60))
        return [backend.operations for backend in backends]

    @pytest.mark.parametrize("victim", range(WORLD))
    def test_the_newest_is_the_old_or_the_new_one_whole(self, with_step_1, victim):
        operations = self.operations(with_step_1)[victim]
        kills = [(op.number, When.BEFORE) for op in operations]
        kills += [(op.number, When.AFTER) for op in operations if op.verb.startswith(("put", "delete"))]
        with ThreadPoolExecutor(16) as trials:  # they mostly wait
            found = trials.map(lambda kill: self.trial(with_step_1, victim, operations, *kill), kills)
            assert set(found) == {1, 2}, "no kill fell before the commit, or none after it"

    def trial(self, with_step_1: MemoryBackend, victim: int, operations: list[Any], number: int, when: When) -> int:
        """Kill a rank at one operation, look at what is left, and return the newest step."""
        inner = fresh()
        copy_all(with_step_1, inner)
        backends: list[Backend] = [FaultBackend(inner) for _ in range(WORLD)]
        backends[victim] = FaultBackend(inner, kill_at=number, kill_when=when)
        outcomes = save_step_2(backends, deadline_seconds=1.0)
        where = f"rank {victim} killed {when.value} {operations[number]}: {outcomes}"
        assert isinstance(outcomes[victim], SimulatedCrash | vc.SaveReport), where

        store = store_on(inner, exists=True)
        newest = store[RUN].step
        assert [info.step for info in store.snapshots(RUN)] == [1, 2][:newest], where
        check_whole(store, 1)
        check_whole(store, newest)
        if isinstance(outcomes[1 - victim], vc.SaveReport):
            assert newest == 2, where
        target = {rank: state_at(0, rank) for rank in range(WORLD)}
        assert {report.step for report in load(store, WORLD, target.__getitem__)} == {newest}
        save(store, WORLD, lambda rank: state_at(3, rank), step=3)  # and the next save is none the worse
        check_whole(store, 3)
        return newest

    def test_the_survivor_is_told_who_is_missing(self, with_step_1):
        inner = fresh()
        copy_all(with_step_1, inner)
        outcomes = save_step_2([inner, FaultBackend(inner, kill_at=0)], deadline_seconds=0.3)
        assert isinstance(outcomes[0], RankFailureError)
        assert "rank 1" in str(outcomes[0])


class TestC052SlowSaveAndRetention:
    def test_the_old_one_stays_until_the_new_one_is_durable(self):
        inner = fresh()
        with vc.Checkpointer(store_on(inner), RUN, keep_last=1) as ckpt:
            ckpt.save(500, state_at(500, 0, 1))
        slow = store_on(LatencyBackend(inner, Latency(request_seconds=0.03)), exists=True)
        seen = []
        with vc.Checkpointer(slow, RUN, keep_last=1) as ckpt:
            handle = ckpt.save(1000, state_at(1000, 0, 1), blocking=False)
            looker = store_on(inner, exists=True)
            while not handle.done:
                steps = [info.step for info in looker.snapshots(RUN)]
                assert steps in ([500], [500, 1000], [1000])
                seen.append(steps)
                newest = looker[RUN].step
                if newest == 500:
                    check_whole(looker, 500)
            handle.result()
        assert seen[0] == [500]
        assert [info.step for info in looker.snapshots(RUN)] == [1000]
        check_whole(looker, 1000)
        looker.gc(grace_seconds=0)
        check_whole(looker, 1000)

    def test_a_crash_in_between_leaves_the_old_one(self):
        inner = fresh()
        with vc.Checkpointer(store_on(inner), RUN, keep_last=1) as ckpt:
            ckpt.save(500, state_at(500, 0, 1))
        copy = fresh()
        copy_all(inner, copy)
        with vc.Checkpointer(store_on(FaultBackend(copy), exists=True), RUN, keep_last=1) as ckpt:
            counted = ckpt.store.backend
            ckpt.save(1000, state_at(1000, 0, 1))
        commit = next(
            op.number for op in counted.operations if op.verb == "put_if_absent" and op.key.startswith("refs/")
        )
        for number in range(commit + 1):
            storage = fresh()
            copy_all(inner, storage)
            ckpt = vc.Checkpointer(store_on(FaultBackend(storage, kill_at=number), exists=True), RUN, keep_last=1)
            with pytest.raises(SimulatedCrash):
                ckpt.save(1000, state_at(1000, 0, 1), blocking=False).result()
            store = store_on(storage, exists=True)
            assert [info.step for info in store.snapshots(RUN)] == [500]
            check_whole(store, 500)
        with vc.Checkpointer(store, RUN, keep_last=1) as ckpt:
            ckpt.save(1000, state_at(1000, 0, 1))
        assert [info.step for info in store.snapshots(RUN)] == [1000]


class TestC054PartsThatNeverArrive:
    def parts(self, rank: int) -> dict:
        def view(start: int) -> vc.ShardedView:
            return vc.ShardedView((6, 4), torch.float32, [((2 * rank, 0), tagged(2, 4, start=start + 100 * rank))])

        return {"model": {"w": view(0)}, "optimizer": {"m": view(1000)}, "loader": vc.PerRank({"at": rank})}

    def test_a_rank_that_never_writes_leaves_nothing_visible(self):
        inner = fresh()

        def body(group):
            backend = FaultBackend(inner)
            if group.rank == 2:
                backend.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/", times=100)
            ckpt = checkpointer(store_on(backend), group, deadline_seconds=5)
            return ckpt.save(1, self.parts(group.rank)).result()

        outcomes = run_ranks(3, body)
        assert all(isinstance(outcome, VeScaleError) for outcome in outcomes)
        assert all("rank 2" in str(outcome) for outcome in outcomes[:2])
        store = store_on(inner, exists=True)
        with pytest.raises(SnapshotNotFoundError):
            store[RUN]
        with pytest.raises(SnapshotNotFoundError):
            store[f"{RUN}@1"]

    def test_a_component_that_one_rank_does_not_have_is_an_error_on_all(self):
        outcomes = try_save(
            memory_store(),
            3,
            lambda rank: {k: v for k, v in self.parts(rank).items() if not (rank == 1 and k == "optimizer")},
        )
        assert all(isinstance(outcome, VeScaleError) for outcome in outcomes)
        assert "optimizer" in str(outcomes[0])

    def test_a_pack_that_is_gone_is_named_with_what_it_held(self):
        store = memory_store()
        save(store, 3, self.parts)
        manifest = store[RUN].manifest
        for pack in manifest.packs:
            broken = fresh()
            copy_all(store.backend, broken)
            loop.run(broken.delete(f"packs/{pack.name[:2]}/{pack.name}"))
            view = torch.zeros(6, 4)
            target = {"model": {"w": view}, "optimizer": {"m": view.clone()}, "loader": vc.PerRank({"at": 0})}
            with pytest.raises(ObjectNotFoundError) as caught:
                load(store_on(broken, exists=True), 1, lambda _, target=target: target, ignore=["loader"])
            assert pack.name in str(caught.value)
            assert "model.w" in str(caught.value) or "optimizer.m" in str(caught.value)
            assert f"{RUN}@1" in str(caught.value)


class FullDisk(WrapperBackend):
    """Takes so many bytes and no more."""

    def __init__(self, inner: Backend, room_bytes: int) -> None:
        super().__init__(inner)
        self.room_bytes = room_bytes

    def _take(self, payload: Payload) -> None:
        if payload_bytes(payload) > self.room_bytes:
            raise NoSpaceError(f"no space for {payload_bytes(payload)} bytes: {self.room_bytes} are left")
        self.room_bytes -= payload_bytes(payload)

    async def put(self, key: str, payload: Payload) -> None:
        self._take(payload)
        await self.inner.put(key, payload)

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        self._take(payload)
        await self.inner.put_if_absent(key, payload)


class TestC056NoSpace:
    OPTIONS = vc.SaveOptions(pack_bytes=1 << 20)

    def state(self, step: int) -> dict:
        generator = torch.Generator().manual_seed(step)
        return {f"t{i}": torch.rand(1_500_000, generator=generator) for i in range(4)}

    def check(self, store: vc.Store, step: int) -> None:
        found = store[f"{RUN}@{step}"].state_dict()
        assert all(same_bits(found[key], value) for key, value in self.state(step).items())

    def packs_bytes(self, backend: Backend) -> int:
        return sum(len(loop.run(backend.get(key))) for key in keys(backend, "packs/"))

    def test_at_any_byte_the_save_fails_and_a_retry_succeeds_with_what_landed(self):
        base = fresh()
        vc.Checkpointer(store_on(base), RUN, options=self.OPTIONS).save(1, self.state(1))
        measured = FullDisk(fresh(), 1 << 40)
        copy_all(base, measured.inner)
        vc.Checkpointer(store_on(measured, exists=True), RUN, options=self.OPTIONS).save(2, self.state(2))
        needed = (1 << 40) - measured.room_bytes
        whole = self.packs_bytes(measured.inner)
        failed = reused = 0
        for room in [*range(0, needed, needed // 8), needed - 1]:
            disk = FullDisk(fresh(), room)
            copy_all(base, disk.inner)
            store = store_on(disk, exists=True)
            ckpt = vc.Checkpointer(store, RUN, options=self.OPTIONS)
            handle = ckpt.save(2, self.state(2), blocking=False)
            outcome = handle.outcome()
            self.check(store, 1)
            if outcome is None:
                assert room > 0.99 * needed  # what came after the commit is no part of the snapshot
                self.check(store, 2)
                continue
            assert isinstance(outcome, NoSpaceError)
            assert [info.step for info in store.snapshots(RUN)] == [1]
            failed += 1
            disk.room_bytes = 1 << 40
            ckpt.save(2, self.state(2))
            self.check(store, 2)
            assert self.packs_bytes(disk.inner) == whole, "what landed is written again under its own name, if at all"
            reused += room > needed // 2
        assert failed >= 8
        assert reused

    def test_what_landed_is_not_reused_unless_it_verifies(self):
        disk = FullDisk(fresh(), 20 << 20)
        store = store_on(disk)
        ckpt = vc.Checkpointer(store, RUN, options=self.OPTIONS)
        with pytest.raises(NoSpaceError):
            ckpt.save(2, self.state(2))
        (first, *_) = keys(disk.inner, "packs/")
        content = loop.run(disk.inner.get(first))
        loop.run(disk.inner.put(first, [content[: len(content) // 2]]))  # cut, as a crash may leave it
        disk.room_bytes = 1 << 40
        ckpt.save(2, self.state(2))
        assert loop.run(disk.inner.get(first)) == content
        self.check(store, 2)


def keys(backend: Backend, prefix: str) -> list[str]:
    async def find() -> list[str]:
        return [info.key async for info in backend.list(prefix)]

    return sorted(loop.run(find()))


class TestC058CopiedStores:
    @pytest.mark.parametrize(("source", "target"), list(itertools.permutations(["local", "memory", "fsspec"], 2)))
    def test_a_copy_is_complete_wherever_it_is_and_gc_deletes_nothing_of_it(self, tmp_path, source, target):
        def url(kind: str) -> str:
            name = f"{kind}-{uuid.uuid4().hex}"
            places = {
                "local": str(tmp_path / name),
                "memory": f"memory://{name}",
                "fsspec": f"local://{tmp_path / name}",
            }
            return places[kind]

        store = vc.open_store(url(source))
        for step in (1, 2):
            save(store, WORLD, lambda rank, step=step: state_at(step, rank), step=step)
        store.tag(RUN, 1, "best")
        place = url(target)
        made = vc.open_store(place)
        copy_all(store.backend, made.backend)
        copied = vc.open_store(place)
        before = keys(copied.backend, "")
        assert [info.step for info in copied.snapshots(RUN)] == [1, 2]
        assert copied[f"{RUN}@best"].step == 1
        for step in (1, 2):
            check_whole(copied, step)
            assert copied[f"{RUN}@{step}"].verify().ok
        copied.gc(grace_seconds=0)
        gone = set(before) - set(keys(copied.backend, ""))
        assert not {key for key in gone if key.startswith(("packs/", "manifests/", "refs/", "store.json"))}
        for step in (1, 2):
            check_whole(copied, step)
        save(copied, WORLD, lambda rank: state_at(3, rank), step=3)
        check_whole(copied, 3)

    def test_a_copy_that_is_not_complete_says_so(self):
        store = memory_store()
        save(store, WORLD, lambda rank: state_at(1, rank))
        partial = fresh()
        copy_all(store.backend, partial)
        for key in keys(partial, "packs/")[:1]:
            loop.run(partial.delete(key))
        copied = store_on(partial, exists=True)
        assert not copied[RUN].verify().ok
        with pytest.raises((ObjectNotFoundError, CorruptionError)):
            copied[RUN].state_dict()
