from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.simulated import planned, plans, replicated
from tests.distributed.worlds import MESHES, shapes, spreads
from vescale_ckpt.geometry import tiles
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.load_plan import Want, chunks_needed, prove_cover
from vescale_ckpt.plan.read_share import share_reads


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Cut tensors of a few hundred bytes into many tiles, which the real bounds would leave whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MIN_TILE_BYTES", 256)
        patch.setattr(tiles, "MIN_RUN_BYTES", 16)
        yield


@st.composite
def states(draw):
    """Draw tensors and how a world holds them; return (state, number of ranks)."""
    mesh = draw(st.sampled_from(MESHES))
    sizes = draw(st.lists(shapes(5000), min_size=1, max_size=4))
    return [draw(spreads(f"w{i}", shape, mesh)) for i, shape in enumerate(sizes)], math.prod(mesh)


def covered(shape, boxes):
    """Count how often each element is in a box."""
    count = np.zeros(shape, dtype=np.int32)
    for box in boxes:
        count[box.slices] += 1
    return count


@settings(deadline=None, max_examples=150)
@given(states())
def test_whatever_the_ranks_hold_each_element_is_written_once_by_a_rank_that_holds_it(drawn):
    state, world_size = drawn
    every = plans(state, world_size)
    for index, tensor in enumerate(state):
        grid = tiles.TileGrid(every[0].tensors[index].shape, every[0].tensors[index].tile)
        written = []
        for rank, plan in enumerate(every):
            for region in (r for r in plan.regions if r.tensor == index):
                boxes = (
                    [region.box] if region.tiles is None else [grid.box(t).intersect(region.box) for t in region.tiles]
                )
                assert all(any(held.contains(box) for held in tensor.boxes[rank]) for box in boxes)
                written += boxes
        assert (covered(tensor.shape, written) == 1).all()
    loads = np.array([plan.bytes_by_rank for plan in every])
    assert (loads == loads[0]).all(), "all ranks make the same plan"
    assert loads[0].sum() == sum(math.prod(t.shape) * t.dtype.itemsize for t in state)
    manifest = planned(state, every)
    for tensor in range(len(state)):
        prove_cover(manifest, tensor)


@settings(deadline=None, max_examples=60)
@given(st.lists(shapes(5000), min_size=1, max_size=12), st.integers(1, 9))
def test_copies_are_shared_as_evenly_as_tiles_allow(sizes, world_size):
    state = [replicated(f"w{i}", shape, world_size) for i, shape in enumerate(sizes)]
    plan = plans(state, world_size)[0]
    largest = max(math.prod(record.tile) * 4 for record in plan.tensors)
    mean = plan.bytes_by_rank.mean()
    assert plan.bytes_by_rank.max() <= mean + 2 * largest


@settings(deadline=None, max_examples=100)
@given(states(), st.data())
def test_whatever_another_world_wants_every_row_is_read_once_by_a_rank_that_needs_it(drawn, data):
    state, world_size = drawn
    manifest = planned(state, plans(state, world_size))
    mesh = data.draw(st.sampled_from(MESHES))
    others = [data.draw(spreads(t.name, t.shape, mesh)) for t in state]
    needed, needs_of = [], []
    for rank in range(math.prod(mesh)):
        wants = [Want(i, box) for i, other in enumerate(others) for box in other.boxes[rank]]
        needs = chunks_needed(manifest, wants)
        for number, want in enumerate(wants):
            targets = [copy.target for need in needs for copy in need.copies if copy.want == number]
            assert (covered(want.box.shape, targets) == 1).all()
        needs_of.append({need.row for need in needs})
        needed.append(np.array([need.row for need in needs], dtype=np.int64))
    round_bytes = data.draw(st.integers(1, 4000))
    readers: dict[int, int] = {}
    for rank in range(math.prod(mesh)):
        share = share_reads(manifest, needed, rank=rank, round_bytes=round_bytes)
        shared = [int(row) for turn in share.rounds for row in turn.rows[turn.reader == rank]]
        for row in (*share.own.tolist(), *shared):
            assert readers.setdefault(row, rank) == rank
            assert row in needs_of[rank]
        for turn in share.rounds:
            assert turn.raw_bytes.sum() <= round_bytes or len(turn.rows) == 1
    assert set(readers) == set().union(*needs_of)


@settings(deadline=None, max_examples=100)
@given(states(), st.data())
def test_a_row_that_is_lost_is_always_missed(drawn, data):
    state, world_size = drawn
    every = plans(state, world_size)
    candidates = [(rank, region) for rank, plan in enumerate(every) for region in plan.regions]
    if not candidates:
        return
    rank, lost = data.draw(st.sampled_from(candidates))
    kept = tuple(region for region in every[rank].regions if region is not lost)
    broken = [*every[:rank], type(every[rank])(**_changed(every[rank], regions=kept)), *every[rank + 1 :]]
    manifest = planned(state, broken)
    with pytest.raises(Exception, match="not every element was written exactly once"):
        prove_cover(manifest, lost.tensor)


def _changed(plan, **values):
    return {name: getattr(plan, name) for name in plan.__slots__} | values


def test_a_box_without_elements_needs_nothing():
    state = [replicated("w", (0, 5), 2)]
    manifest = planned(state, plans(state, 2))
    assert chunks_needed(manifest, [Want(0, Box.whole((0, 5)))]) == []
