"""Any layout to any layout, over random shapes, meshes and placements: every bit comes back, every byte once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.inputs import blank_at, coordinate_of, local_of, same_bits, view_at
from tests.cases.worlds import load, memory_store, save
from tests.distributed import simulated
from tests.properties.test_layouts import layouts, shapes
from vescale_ckpt.geometry.tiles import TileGrid
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Flat
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_storage.backends.memory import MemoryBackend

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.complex128]


@dataclass(frozen=True)
class Case:
    """One tensor, and how the world that saves and the world that loads hold it."""

    full: torch.Tensor
    source: Layout
    target: Layout


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes)
    dtype = draw(st.sampled_from(DTYPES))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=seed)
    if dtype is torch.bool:
        raw &= 1
    return Case(raw.view(dtype).reshape(shape), draw(layouts(shape)), draw(layouts(shape)))


def world_size(tensors: list[Case], side: str) -> int:
    return max(math.prod(getattr(case, side).mesh_shape) for case in tensors)


def source_state(tensors: list[Case], rank: int) -> dict:
    state = {}
    for number, case in enumerate(tensors):
        at = coordinate_of(case.source, rank)
        nothing = ShardedView(tuple(case.full.shape), case.full.dtype)
        state[f"t{number}"] = nothing if at is None else view_at(case.full, case.source, at)
    return state


@settings(max_examples=80, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=3), st.sampled_from(["raw", "zstd"]))
def test_every_bit_is_there_on_any_other_layout(tensors: list[Case], codec: str) -> None:
    store = memory_store()
    save(store, world_size(tensors, "source"), lambda rank: source_state(tensors, rank), codec=codec)

    memory: dict[tuple[int, int], torch.Tensor] = {}

    def target_state(rank: int) -> dict:
        state = {}
        for number, case in enumerate(tensors):
            at = coordinate_of(case.target, rank)
            if at is None:
                state[f"t{number}"] = ShardedView(tuple(case.full.shape), case.full.dtype)
            else:
                memory[number, rank], state[f"t{number}"] = blank_at(case.full, case.target, at)
        return state

    load(store, world_size(tensors, "target"), target_state)
    for (number, rank), local in memory.items():
        case = tensors[number]
        at = coordinate_of(case.target, rank)
        assert same_bits(local, local_of(case.full, case.target, at)), (number, rank)
    whole = store["run"].state_dict()
    for number, case in enumerate(tensors):
        assert same_bits(whole[f"t{number}"], case.full)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_element_is_written_once_and_every_byte_is_read_once(case: Case) -> None:
    shape = tuple(case.full.shape)
    num_ranks = math.prod(case.source.mesh_shape)
    source = simulated.laid_out("t", shape, case.source, dtype=case.full.dtype, full=case.full)
    target = simulated.laid_out("t", shape, case.target, dtype=case.full.dtype, full=case.full)
    written = np.zeros(shape, dtype=np.int64)
    for plan in simulated.plans([source], num_ranks):
        for region in plan.regions:
            grid = TileGrid(shape, plan.tensors[0].tile)
            boxes = [region.box] if region.tiles is None else [grid.box(t).intersect(region.box) for t in region.tiles]
            for box in boxes:
                written[box.slices] += 1
    assert (written == 1).all()

    backend = MemoryBackend(f"reshard-{id(case)}")
    saved = simulated.save(backend, [source], num_ranks)
    assert sum(w.bytes_total for w in saved.written) == case.full.numel() * case.full.itemsize
    loaded = simulated.load(backend, saved.manifest, [target], math.prod(case.target.mesh_shape))
    every = [row for rows in loaded.rows_read for row in rows]
    assert len(every) == len(set(every))
    for pieces in loaded.pieces:
        for piece in pieces:
            assert same_bits(piece.view, case.full[piece.box.slices] if shape else case.full)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([1, 2, 16, 64]),
    st.sampled_from([1, 3, 16]),
)
def test_buckets_with_padding_and_alignment_move_between_any_world_sizes(
    parameters: list[tuple[int, ...]], source_ranks: int, target_ranks: int, source_align: int, target_align: int
) -> None:
    fulls = [
        torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1000 * i
        for i, shape in enumerate(parameters)
    ]
    store = memory_store()

    def of_rank(rank: int, num_ranks: int, align: int, fill: bool) -> tuple[torch.Tensor, dict, torch.Tensor]:
        """Return (this rank's shard of the bucket, the state, what the shard must be)."""
        starts, end = [], 0
        for full in fulls:
            starts.append(end)
            end += -(-full.numel() // align) * align
        per_rank = -(-max(end, 1) // num_ranks)
        per_rank = -(-per_rank // align) * align
        bucket = torch.full((per_rank * num_ranks,), -7.0, dtype=torch.float64)  # padding is no data
        for start, full in zip(starts, fulls, strict=True):
            bucket[start : start + full.numel()] = full.reshape(-1)
        right = bucket[rank * per_rank : (rank + 1) * per_rank]
        shard = right.clone() if fill else torch.full_like(right, -7.0)
        state = {}
        for number, (start, full) in enumerate(zip(starts, fulls, strict=True)):
            layout = Layout((num_ranks,), (Flat.in_bucket(start, full.numel(), per_rank, num_ranks),))
            low = min(max(start, rank * per_rank), (rank + 1) * per_rank) - rank * per_rank
            high = min(max(start + full.numel(), rank * per_rank), (rank + 1) * per_rank) - rank * per_rank
            local = shard[low : max(high, low)]
            state[f"p{number}"] = ShardedView.laid_out(local, tuple(full.shape), layout, (rank,))
        return shard, state, right

    save(store, source_ranks, lambda rank: of_rank(rank, source_ranks, source_align, fill=True)[1])
    assert {name: info.shape for name, info in store["run"].tensors().items()} == {
        f"p{i}": shape for i, shape in enumerate(parameters)
    }
    shards: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def target(rank: int) -> dict:
        shard, state, right = of_rank(rank, target_ranks, target_align, fill=False)
        shards[rank] = (shard, right)
        return state

    load(store, target_ranks, target)
    assert all(same_bits(shard, right) for shard, right in shards.values())
