from __future__ import annotations

import numpy as np
import pytest

from vescale_ckpt.errors import FormatError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.rows import gather_rows, group_equal, water_levels

NDIM = np.array([2, 0, 1])


def gathered(*ranks, ndim=NDIM):
    """Return rows of ranks that each hold ``[(tensor, box), ...]``."""
    columns = []
    for rank, held in enumerate(ranks):
        tensors = np.arange(len(ndim))
        counts = np.array([sum(t == tensor for t, _ in held) for tensor in tensors])
        values = [n for tensor in tensors for t, b in held if t == tensor for n in (*b.offset, *b.shape)]
        columns.append((rank, tensors, counts, np.array(values, dtype=np.int64)))
    return gather_rows(columns, np.asarray(ndim))


def held_by(rows, groups):
    """Return {(tensor, box): ranks} of groups."""
    return {
        (int(rows.tensor[f]), rows.box(int(f))): rows.rank[groups.order[s : s + n]].tolist()
        for f, s, n in zip(groups.first, groups.start, groups.size, strict=True)
    }


MATRIX, SCALAR, LINE = Box((1, 2), (3, 4)), Box((), ()), Box((5,), (6,))


def test_boxes_of_every_number_of_dims_come_back():
    rows = gathered([(0, MATRIX), (1, SCALAR), (2, LINE)], [], [(2, LINE), (2, Box((0,), (5,)))])
    assert [(int(r), int(t), rows.box(i)) for i, (r, t) in enumerate(zip(rows.rank, rows.tensor, strict=True))] == [
        (0, 0, MATRIX),
        (0, 1, SCALAR),
        (0, 2, LINE),
        (2, 2, LINE),
        (2, 2, Box((0,), (5,))),
    ]
    assert rows.volume.tolist() == [12, 1, 6, 6, 5]


def test_ranks_may_list_tensors_in_an_order_of_their_own():
    columns = [
        (0, np.array([0, 2]), np.array([1, 1]), np.array([1, 2, 3, 4, 5, 6])),
        (1, np.array([2, 0]), np.array([1, 1]), np.array([5, 6, 1, 2, 3, 4])),
    ]
    rows = gather_rows(columns, NDIM)
    assert held_by(rows, group_equal(rows)) == {(0, MATRIX): [0, 1], (2, LINE): [0, 1]}


def test_equal_boxes_are_one_group_with_its_ranks_in_order():
    rows = gathered([(0, MATRIX)], [(1, SCALAR)], [(0, MATRIX), (1, SCALAR)], [(0, Box((1, 2), (3, 5)))])
    groups = group_equal(rows)
    assert held_by(rows, groups) == {(0, MATRIX): [0, 2], (0, Box((1, 2), (3, 5))): [3], (1, SCALAR): [1, 2]}
    assert [groups.slice_of(t) for t in range(3)] == [slice(0, 2), slice(2, 3), slice(3, 3)]


def test_the_same_numbers_of_two_tensors_are_two_groups():
    rows = gathered([(0, Box((0, 0), (2, 1))), (1, Box((0,), (2,)))], ndim=[2, 1])
    assert len(group_equal(rows).first) == 2


def test_empty_boxes_are_held_by_nobody_and_a_box_held_twice_counts_once():
    rows = gathered([(2, LINE), (2, LINE), (2, Box((3,), (0,)))], [(2, Box((0,), (0,)))])
    assert held_by(rows, group_equal(rows)) == {(2, LINE): [0]}


def test_no_boxes_at_all_are_no_groups():
    rows = gathered([], [])
    groups = group_equal(rows)
    assert groups.first.size == 0
    assert list(groups.replica_sets(rows)) == []


def test_replica_sets_are_those_of_exactly_equal_members_smaller_ones_first():
    a, b, c, d, e = (Box((n,), (1,)) for n in range(5))
    of_rank = [[a, b, c, e], [a, b, c], [a, b], [a, d], [d]]
    rows = gathered(*[[(2, box) for box in boxes] for boxes in of_rank])
    groups = group_equal(rows)
    found = [
        (members.tolist(), [rows.box(int(groups.first[g])) for g in chosen])
        for members, chosen in groups.replica_sets(rows)
    ]
    assert found == [([0, 1], [c]), ([3, 4], [d]), ([0, 1, 2], [b]), ([0, 1, 2, 3], [a])]


@pytest.mark.parametrize("seed", range(20))
def test_sorting_by_one_number_is_sorting_by_columns(seed):
    rng = np.random.default_rng(seed)
    far = int(rng.choice([2, 100, 1 << 40]))  # the last does not fit into one number

    def held():
        for tensor in sorted(rng.integers(0, 3, rng.integers(0, 8)).tolist()):
            ndim = int(NDIM[tensor])
            sizes = rng.integers(0 if seed % 2 else 1, 3, ndim) if seed % 3 else np.ones(ndim, dtype=np.int64)
            yield tensor, Box(tuple(rng.integers(0, far, ndim).tolist()), tuple(sizes.tolist()))

    rows = gathered(*[list(held()) for _ in range(6)])
    found: dict = {}
    for row in range(len(rows.rank)):
        box = rows.box(row)
        if box.volume:
            ranks = found.setdefault((int(rows.tensor[row]), box.offset, box.shape), [])
            if int(rows.rank[row]) not in ranks:
                ranks.append(int(rows.rank[row]))
    groups = held_by(rows, group_equal(rows))
    assert list(groups) == [(tensor, Box(offset, shape)) for tensor, offset, shape in sorted(found)]
    assert list(groups.values()) == [found[key] for key in sorted(found)]


def test_a_rank_that_sends_too_few_or_too_many_numbers_is_named():
    columns = [
        (0, np.array([2]), np.array([1]), np.array([5, 6])),
        (1, np.array([0]), np.array([1]), np.array([1, 2, 3])),
        (2, np.array([2]), np.array([1]), np.array([5, 6, 7])),
    ]
    with pytest.raises(FormatError, match="rank 1 sent 3 numbers for boxes that have 4"):
        gather_rows(columns, NDIM)
    with pytest.raises(FormatError, match="rank 2 sent 3"):
        gather_rows([columns[0], columns[2]], NDIM)
    assert len(gather_rows([columns[0], (1, np.array([2]), np.array([0]), np.array([], np.int64))], NDIM).rank) == 1


@pytest.mark.parametrize("seed", range(20))
def test_water_levels_raise_the_lowest_to_one_level(seed):
    chance = np.random.default_rng(seed)
    loads = chance.integers(0, 50, size=int(chance.integers(1, 9)))
    total = int(chance.integers(0, 300))
    taken = water_levels(loads, total)
    assert (taken >= 0).all()
    assert total <= taken.sum() < total + len(loads), "rounded up by less than one each"
    level = (loads + taken)[taken > 0]
    assert level.size == 0 or level.max() == level.min()
    assert (loads[taken == 0] >= level.max(initial=0)).all()
