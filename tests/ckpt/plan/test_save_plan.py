from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest

from tests.distributed.simulated import Spread, laid_out, plans, quick_plans, replicated
from vescale_ckpt.errors import MismatchError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.tiles import TileGrid
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Replicate, Shard, StridedShard
from vescale_ckpt.plan.holdings import LeafSpec
from vescale_ckpt.plan.save_plan import merge_tables

MIB = 1 << 20


def boxes_written(plan, tensor):
    """Return the boxes of one tensor that a rank writes."""
    record = plan.tensors[tensor]
    grid = TileGrid(record.shape, record.tile)
    for region in plan.regions:
        if region.tensor == tensor:
            if region.tiles is None:
                yield region.box
            else:
                yield from (part for t in region.tiles if (part := grid.box(t).intersect(region.box)) is not None)


def bytes_written(plan, state):
    return sum(box.volume * t.dtype.itemsize for index, t in enumerate(state) for box in boxes_written(plan, index))


def prove(state, world_size, every):
    """Check that the plans of all ranks write every element exactly once, from what each rank holds."""
    for index, tensor in enumerate(state):
        written = []
        for rank, plan in enumerate(every):
            mine = list(boxes_written(plan, index))
            assert all(any(held.contains(box) for held in tensor.boxes[rank]) for box in mine)
            written += mine
        report = check_cover(tensor.shape, written)
        assert not report.missing, (tensor.name, report.missing[:3])
        assert not report.overlaps, (tensor.name, report.overlaps[:3])
    loads = every[0].bytes_by_rank
    for rank, plan in enumerate(every):
        assert plan.bytes_by_rank.tolist() == loads.tolist()
        assert bytes_written(plan, state) == loads[rank]
        assert plan.tensors == every[0].tensors
    assert len(loads) == world_size


def imbalance(plan):
    return plan.bytes_by_rank.max() / plan.bytes_by_rank.mean()


def test_one_rank_writes_all():
    state = [replicated("w", (300, 500), 1), replicated("s", (), 1), replicated("none", (0, 4), 1)]
    every = plans(state, 1)
    prove(state, 1, every)
    assert [region.tensor for region in every[0].regions] == [0, 1]
    assert every[0].bytes_by_rank.tolist() == [600004]
    assert every[0].compared == ()


LAYOUTS = [
    Layout((2,), (Shard(0),)),
    Layout((4,), (Shard(1),)),
    Layout((3,), (Shard(1),)),
    Layout((8,), (Shard(0),)),
    Layout((2, 2), (Shard(0), Shard(1))),
    Layout((2, 2), (StridedShard(0, 2), Shard(0))),
    Layout((2, 2), (Replicate(), Shard(0))),
    Layout((2, 3), (Shard(1), Replicate())),
    Layout((5,), (Replicate(),)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_is_written_once_by_a_rank_that_holds_it(layout):
    world_size = int(np.prod(layout.mesh_shape))
    state = [
        laid_out("large", (700, 900), layout),
        laid_out("odd", (7, 5), layout),
        laid_out("narrow", (3, 2), layout),
        replicated("copied", (513, 257), world_size),
        replicated("scalar", (), world_size),
    ]
    prove(state, world_size, plans(state, world_size))


def test_mixed_states_of_many_worlds_are_covered():
    for rows, columns in itertools.product((1, 2, 3), (1, 2, 4)):
        world_size = rows * columns
        state = [
            laid_out(f"{n}-{a}-{b}", (n, 33), Layout((rows, columns), (a, b)))
            for n in (1, 6, 1000)
            for a, b in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)
        ]
        prove(state, world_size, plans(state, world_size))


def test_one_large_and_eight_small_copies_are_balanced_over_four_ranks():
    state = [replicated("large", (4096, 1024), 4), *[replicated(f"small{i}", (64, 64), 4) for i in range(8)]]
    every = plans(state, 4)
    prove(state, 4, every)
    assert imbalance(every[0]) <= 1.10


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("shapes", [[(5000, 1000)], [(100, 100)] * 50, [(2000, 1000), *[(7, 9)] * 100]])
def test_copies_are_balanced_as_far_as_their_tiles_allow(world_size, shapes):
    state = [replicated(str(i), shape, world_size) for i, shape in enumerate(shapes)]
    every = plans(state, world_size)
    prove(state, world_size, every)
    loads = every[0].bytes_by_rank
    record = every[0].tensors[0]
    assert loads.max() - loads.min() <= 2 * int(np.prod(record.tile)) * 4


def test_what_ranks_write_anyway_counts_and_the_water_rises_evenly():
    alone = Spread("alone", (8 * MIB // 4,), [[Box((0,), (8 * MIB // 4,))], [], [], []])
    state = [alone, replicated("shared", (4096, 1024), 4)]
    every = plans(state, 4)
    prove(state, 4, every)
    loads = every[0].bytes_by_rank / MIB
    assert loads[0] == 8, "the rank that has most already takes nothing more"
    assert max(loads[1:]) - min(loads[1:]) <= 0.5
    both = [alone, replicated("shared", (8192, 1024), 4)]
    assert imbalance(plans(both, 4)[0]) <= 1.05, "24 MiB more than level all four"


def test_a_small_replica_set_goes_first_and_a_larger_one_levels_out_what_it_leaves():
    pair = Spread("pair", (2048, 1024), [[Box.whole((2048, 1024))]] * 2 + [[], []])
    state = [replicated("all", (2048, 1024), 4), pair]
    every = plans(state, 4)
    prove(state, 4, every)
    assert imbalance(every[0]) <= 1.05
    assert {r.tensor for plan in every[2:] for r in plan.regions} == {0}


def test_hsdp_replicas_share_each_shard():
    state = [laid_out("w", (4096, 1024), Layout((2, 2), (Replicate(), Shard(0))))]
    every = plans(state, 4)
    prove(state, 4, every)
    assert imbalance(every[0]) <= 1.02
    assert every[0].compared == (), "sharded holdings are not compared"


def test_copies_that_several_ranks_hold_whole_are_compared_by_those_that_hold_them():
    state = [
        replicated("all", (10,), 3),
        Spread("two", (10,), [[Box.whole((10,))], [Box.whole((10,))], []], holding="replicated"),
        Spread("one", (10,), [[Box.whole((10,))], [], []], holding="replicated"),
        Spread("own", (10,), [[Box.whole((10,))], [], []], holding="per_rank"),
    ]
    assert [plan.compared for plan in plans(state, 3)] == [(0, 1), (0, 1), (0,)]


def test_an_alias_has_a_record_and_nothing_to_write():
    state = [replicated("w", (4, 4), 2), dataclasses.replace(replicated("tied", (4, 4), 2), alias_of="w")]
    every = plans(state, 2)
    assert every[0].tensors[1].alias_of == 0
    assert {r.tensor for plan in every for r in plan.regions} == {0}
    assert every[0].bytes_by_rank.sum() == 64


def test_stages_that_hold_different_tensors_make_one_table():
    first = Spread("a", (8,), [[Box.whole((8,))], []])
    second = Spread("b", (8,), [[], [Box.whole((8,))]])
    every = plans([first, second], 2)
    assert [r.tensor for plan in every for r in plan.regions] == [0, 1]


def refused(*state):
    with pytest.raises(MismatchError) as caught:
        plans(list(state), len(state[0].boxes))
    return caught.value


def test_an_element_that_nobody_holds_is_named():
    error = refused(Spread("w", (10, 2), [[Box((0, 0), (4, 2))], [Box((4, 0), (3, 2))]]))
    assert error.problems == (f"'w' {Box((7, 0), (3, 2))}: held by no rank",)
    assert "state the global shape" in str(error)


def test_boxes_that_overlap_without_being_equal_are_named_with_their_ranks():
    error = refused(Spread("w", (10,), [[Box((0,), (6,))], [Box((5,), (5,))]]))
    assert len(error.problems) == 1
    for part in ("'w'", "rank 0 holds", "rank 1 holds", "overlap"):
        assert part in error.problems[0]


def test_a_hole_is_found_though_an_overlap_makes_up_for_its_elements():
    error = refused(Spread("w", (10,), [[Box((0,), (6,))], [Box((4,), (4,))]]))
    assert any("held by no rank" in problem for problem in error.problems)
    assert any("overlap" in problem for problem in error.problems)


@pytest.mark.parametrize("seed", range(30))
def test_a_state_is_refused_exactly_where_its_boxes_do_not_tile_it(seed):
    rng = np.random.default_rng(seed)
    shapes = [(6, 6), (12,), (4, 3, 2)]
    state = []
    for number, shape in enumerate(shapes):
        boxes = [Box.whole(shape)]
        for _ in range(int(rng.integers(0, 6))):  # cut some box in two
            box = boxes.pop(int(rng.integers(len(boxes))))
            dim = int(rng.integers(len(shape)))
            at = int(rng.integers(0, box.shape[dim] + 1))
            low = Box(box.offset, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
            offset = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
            boxes += [low, Box(offset, (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :]))]
        if rng.random() < 0.5:  # move one: as many elements as before, but some twice and some never
            at = int(rng.integers(len(boxes)))
            room = [n - size for n, size in zip(shape, boxes[at].shape, strict=True)]
            boxes[at] = Box(tuple(int(rng.integers(0, r + 1)) for r in room), boxes[at].shape)
        state.append(Spread(f"w{number}", shape, [[box] for box in boxes] + [[]] * (8 - len(boxes))))
    bad = [
        t.name
        for t in state
        if not check_cover(t.shape, list({box for [box] in filter(None, t.boxes) if box.volume})).ok
    ]
    if bad:
        assert {problem.split("'")[1] for problem in refused(*state).problems} == set(bad)
    else:
        prove(state, 8, plans(state, 8))


def test_boxes_that_are_no_grid_are_proved_box_by_box():
    spiral = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    state = [Spread("w", (3, 3), [[box] for box in spiral])]
    prove(state, 5, plans(state, 5))
    assert "held by no rank" in refused(Spread("w", (3, 3), [[box] for box in spiral[:4]])).problems[0]


def test_all_tensors_that_are_not_whole_are_listed():
    error = refused(*[Spread(f"w{i}", (4,), [[Box((0,), (3,))], []]) for i in range(3)])
    assert [problem.split()[0] for problem in error.problems] == ["'w0'", "'w1'", "'w2'"]


A = LeafSpec(("a",), "float32", 4, (2, 3), "tensor", "sharded")
B = LeafSpec(("b",), "int8", 1, (5,), "tensor", "replicated")


def test_tables_unite_in_the_order_of_first_sight():
    assert merge_tables([((0, 2), (A,)), ((1,), (B, A))]) == (A, B)
    assert merge_tables([]) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float16"), ("shape", (3, 2)), ("kind", "numpy"), ("holding", "replicated"), ("alias_of", ("b",))],
)
def test_ranks_that_disagree_on_a_tensor_are_named_with_both_values(field, value):
    other = dataclasses.replace(A, **{field: value})
    with pytest.raises(MismatchError) as caught:
        merge_tables([((0, 1), (A, B)), ((2,), (other, B)), ((3,), (other, dataclasses.replace(B, shape=(6,))))])
    problems = caught.value.problems
    assert len(problems) == 3, "every rank that differs is told of"
    assert problems[0] == f"'a': {field} {getattr(A, field)} on rank 0 against {value} on rank 2"
    assert problems[2] == "'b': shape (5,) on rank 0 against (6,) on rank 3"


def test_a_thousand_ranks_are_planned_in_a_loop():
    world_size = 1024
    fsdp, hsdp = Layout((1024,), (Shard(0),)), Layout((512, 2), (Replicate(), Shard(1)))
    state = [
        laid_out("fsdp", (2500, 32), fsdp),
        laid_out("hsdp", (2048, 4096), hsdp),
        replicated("norm", (512,), world_size),
    ]
    every = quick_plans(state, world_size, range(world_size))
    prove(state, world_size, every)
    # 32 MiB in 128 tiles of 256 KiB: some ranks have one of them, the others none.
    assert every[0].bytes_by_rank.max() <= 256 * 1024 + 3 * 32 * 4


def test_many_tensors_on_many_ranks_are_planned_in_seconds():
    fsdp = Layout((256,), (Shard(0),))
    state = [laid_out(f"w{i}", (2048, 64), fsdp) for i in range(80)]
    began = time.process_time()
    (plan,) = quick_plans(state, 256, [3])
    assert time.process_time() - began < 10, "20,480 boxes, most of the time to lay them out"
    assert len(plan.regions) == 80
