"""C136 and C140: who writes and reads copies, and how much of them."""

from __future__ import annotations

import uuid

import pytest
import torch

from tests.cases.inputs import coordinate_of, same_bits, tagged, view_at
from tests.cases.worlds import RUN, all_well, checkpointer, memory_store, save, store_on
from tests.distributed.threads import run_ranks
from vescale_ckpt.errors import CorruptionError, RankFailureError
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Replicate, Shard
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.wrappers.faults import FaultBackend

WORLD = 4


class TestC136CopiesAreSharedOut:
    def state(self) -> dict:
        generator = torch.Generator().manual_seed(0)
        return {f"t{i}": torch.rand(250_000, generator=generator) for i in range(40)} | {"small": tagged(3), "step": 1}

    def on_ranks(self, act) -> tuple[list, list[FaultBackend]]:
        backends = [FaultBackend(self.inner) for _ in range(WORLD)]

        def body(group):
            return act(checkpointer(store_on(backends[group.rank]), group), group.rank)

        return all_well(run_ranks(WORLD, body)), backends

    def test_writing_is_even_and_a_load_reads_every_byte_once(self):
        self.inner = MemoryBackend(uuid.uuid4().hex)
        states = [self.state() for _ in range(WORLD)]
        reports, _ = self.on_ranks(lambda ckpt, rank: ckpt.save(1, states[rank]).result())
        total = 40 * 1_000_000 + 12
        assert sum(report.bytes_total for report in reports) == total
        for report in reports:
            assert report.bytes_total <= 1.5 * total / WORLD
            assert report.bytes_written <= 1.5 * total / WORLD
            assert report.imbalance <= 1.05
        targets = [{k: torch.zeros_like(v) if k != "step" else 0 for k, v in s.items()} for s in states]
        loads, backends = self.on_ranks(lambda ckpt, rank: ckpt.load(targets[rank]))
        assert sum(load.bytes_read for load in loads) == total
        for load, backend, target in zip(loads, backends, targets, strict=True):
            assert load.bytes_needed == total
            assert load.bytes_read <= 1.5 * total / WORLD
            packs = {op.key for op in backend.operations if op.key.startswith("packs/")}
            assert len(packs) <= WORLD, "a rank does not open everybody's files"
            assert all(same_bits(target[k], v) for k, v in states[0].items() if k != "step")
            assert target["step"] == 1

    def test_a_second_save_of_the_same_costs_nothing(self):
        self.inner = MemoryBackend(uuid.uuid4().hex)
        states = [self.state() for _ in range(WORLD)]

        def twice(ckpt, rank):
            ckpt.save(1, states[rank])
            return ckpt.save(2, states[rank]).result()

        reports, backends = self.on_ranks(twice)
        assert sum(report.bytes_written for report in reports) == 0
        packs = [op.key for b in backends for op in b.operations if op.verb == "put_if_absent" and "packs" in op.key]
        assert len(packs) <= WORLD

    def test_sharded_on_the_same_layout_each_reads_its_own(self):
        self.inner = MemoryBackend(uuid.uuid4().hex)
        full = {name: value.reshape(1000, 250) for name, value in self.state().items() if name.startswith("t")}
        rows = Layout((WORLD,), (Shard(0),))
        views = [{k: view_at(v, rows, (rank,)) for k, v in full.items()} for rank in range(WORLD)]
        self.on_ranks(lambda ckpt, rank: ckpt.save(1, views[rank]).result())
        loads, backends = self.on_ranks(lambda ckpt, rank: ckpt.load(views[rank]))
        for load, backend in zip(loads, backends, strict=True):
            assert load.bytes_read == load.bytes_needed == 10_000_000
            assert load.bytes_exchanged == 0
            packs = {op.key for op in backend.operations if op.key.startswith("packs/")}
            assert len(packs) == 1, "its own pack alone"


class TestC140ReplicatedShards:
    HSDP = Layout((2, 3), (Replicate(), Shard(0)))
    FULL = tagged(10, 4)

    def view(self, rank: int) -> dict:
        return {"w": view_at(self.FULL, self.HSDP, coordinate_of(self.HSDP, rank))}

    def test_one_copy_in_total(self):
        store = memory_store()
        reports = save(store, 6, self.view)
        assert sum(report.bytes_total for report in reports) == 10 * 4 * 4
        assert same_bits(store[RUN].read("w"), self.FULL)

    @pytest.mark.parametrize("replica", [0, 1])
    def test_one_replica_group_alone_can_save_all_of_it_to_its_own_root(self, replica):
        store = memory_store()
        reports = save(store, 3, lambda rank: self.view(3 * replica + rank))
        assert sum(report.bytes_total for report in reports) == 10 * 4 * 4
        assert same_bits(store[RUN].read("w"), self.FULL)

    def test_ranks_that_see_different_storage_are_told_whose_object_is_missing(self):
        roots = [MemoryBackend(uuid.uuid4().hex) for _ in range(2)]
        for root in roots:
            save(store_on(root), 1, lambda _: {"x": 1}, run="another")

        def body(group):
            ckpt = checkpointer(store_on(roots[group.rank // 3], exists=True), group, deadline_seconds=0.5)
            return ckpt.save(1, self.view(group.rank)).result()

        outcomes = run_ranks(6, body)
        assert all(isinstance(outcome, RankFailureError | CorruptionError) for outcome in outcomes), outcomes
        assert "rank" in str(outcomes[0])
        assert any(f"{rank}" in str(outcomes[0]) for rank in (3, 4, 5))
        for root in roots:
            assert store_on(root, exists=True).newest(RUN) is None
