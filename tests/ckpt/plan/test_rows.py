from __future__ import annotations

import numpy as np

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.rows import gather_rows, group_equal

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
