from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch

from tests.distributed import simulated
from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.errors import CorruptionError, RankFailureError
from vescale_ckpt.execute.exchange import Exchange
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout, spans
from vescale_ckpt.layout.placement import Replicate, Shard
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_ckpt.plan.read_share import share_reads
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.wrappers.faults import FaultBackend

SHAPE = (700, 500)


@pytest.fixture(scope="module")
def stored():
    full = torch.from_numpy(np.random.default_rng(1).random(SHAPE, dtype=np.float32))
    odd = torch.arange(5, dtype=torch.uint8)
    state = [
        simulated.replicated("odd", (5,), 1, full=odd, dtype=torch.uint8),
        simulated.replicated("w", SHAPE, 1, full=full),
    ]
    backend = MemoryBackend(uuid.uuid4().hex)
    return backend, simulated.save(backend, state, 1).manifest, {"odd": odd, "w": full}


def exchange(stored, boxes, group, *, round_bytes=1 << 30, backend=None):
    """Take all rounds on one rank; check what is delivered and return the counts."""
    home, manifest, tensors = stored
    wants = [Want(manifest.by_path[name,], box) for name, box in boxes[group.rank]]
    needs = {need.row: need for need in chunks_needed(manifest, wants)}
    needed = [np.frombuffer(rows, dtype="<i8") for rows in group.all_gather(np.array(list(needs), "<i8").tobytes())]
    share = share_reads(manifest, needed, rank=group.rank, round_bytes=round_bytes)
    reader = Reader(backend or home, manifest, ReadOptions())
    swaps = Exchange(group, reader, needs)
    got = []

    def deliver(need, raw):
        name = manifest.tensors[need.tensor].path[0]
        part = tensors[name][need.box.slices].contiguous()
        assert torch.equal(raw.view(part.dtype).view(part.shape), part), "aligned for its items, and right"
        got.append(need.row)

    for turn in share.rounds:
        group.attempt("reading", lambda turn=turn: swaps.read(turn))
        swaps.swap(turn, deliver)
        assert swaps._held == {}, "memory of a round does not outlive it"
    assert sorted([*got, *share.own.tolist()]) == sorted(needs)
    return len(share.rounds), reader.counters.bytes_read, swaps.bytes_received


def whole(*names):
    return [(name, Box.whole({"odd": (5,), "w": SHAPE}[name])) for name in names]


def test_copies_on_all_ranks_cost_storage_one_read(stored):
    boxes = [whole("odd", "w")] * 4
    outcomes = all_well(run_ranks(4, lambda group: exchange(stored, boxes, group)))
    total = 5 + 700 * 500 * 4
    assert {rounds for rounds, _, _ in outcomes} == {1}
    assert sum(read for _, read, _ in outcomes) == total
    assert all(read + received == total for _, read, received in outcomes)


@pytest.mark.parametrize("round_bytes", [1, 300_000, 1 << 30])
def test_rounds_of_any_size_deliver_the_same(stored, round_bytes):
    layout = Layout((3, 2), (Replicate(), Shard(1)))
    boxes = [[("w", s.box) for s in spans(layout, SHAPE, divmod(rank, 2))] + whole("odd") for rank in range(6)]
    outcomes = all_well(run_ranks(6, lambda group: exchange(stored, boxes, group, round_bytes=round_bytes)))
    assert sum(read for _, read, _ in outcomes) == 5 + 700 * 500 * 4
    assert (outcomes[0][0] > 1) == (round_bytes < 1 << 30)


def test_a_rank_that_wants_nothing_takes_part_all_the_same(stored):
    boxes = [whole("w"), [], whole("w", "odd")]
    outcomes = all_well(run_ranks(3, lambda group: exchange(stored, boxes, group, round_bytes=1)))
    assert outcomes[1][1:] == (0, 0)
    assert outcomes[0][0] > 1


def test_damage_is_raised_on_the_rank_that_reads_and_told_to_the_others(stored):
    backend = FaultBackend(stored[0])
    backend.corrupt("get_into", 10, prefix="packs/", times=10**6)
    outcomes = run_ranks(3, lambda group: exchange(stored, [whole("w")] * 3, group, backend=backend))
    assert any(isinstance(outcome, CorruptionError) for outcome in outcomes)
    assert all(isinstance(outcome, CorruptionError | RankFailureError) for outcome in outcomes)
