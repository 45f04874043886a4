from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.comm.tree import TreeSum, children, nodes_of, sum_nodes, tree_sum, units_of
from vescale_train.errors import InvalidInputError, StateError


def by_levels(units):
    """Pair neighbours level by level, in the plainest way."""
    level = list(units)
    while len(level) > 1:
        level = [level[i] + level[i + 1] if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def random_units(num_units, seed=0, numel=7):
    values = np.random.default_rng(seed).normal(size=(num_units, numel))
    return list(torch.tensor(values, dtype=torch.float32))


@given(st.integers(1, 40))
def test_the_tree_pairs_neighbours_level_by_level(num_units):
    units = random_units(num_units)
    assert torch.equal(tree_sum(units), by_levels(units))


def test_a_running_sum_has_other_bits():
    units = random_units(16, numel=1000)
    assert not torch.equal(tree_sum(units), torch.stack(units).cumsum(0)[-1])


@given(st.integers(2, 1000), st.integers(0, 1000))
def test_children_share_a_node_and_the_left_one_is_a_power_of_two(length, start):
    left, right = children((start, start + length))
    assert left[0] == start
    assert left[1] == right[0]
    assert right[1] == start + length
    size = left[1] - left[0]
    assert size & (size - 1) == 0
    assert size >= right[1] - right[0] > 0


@given(st.integers(1, 300), st.data())
def test_nodes_cover_their_range_and_are_few(num_units, data):
    start = data.draw(st.integers(0, num_units - 1))
    stop = data.draw(st.integers(start + 1, num_units))
    nodes = nodes_of(range(start, stop), num_units)
    assert [unit for node in nodes for unit in range(*node)] == list(range(start, stop))
    assert len(nodes) <= max(1, 2 * num_units.bit_length())


def test_ranks_that_are_powers_of_two_hold_one_subtree_each():
    for num_ranks in (1, 2, 4, 8):
        assert all(len(nodes_of(units_of(r, num_ranks, 8), 8)) == 1 for r in range(num_ranks))


@given(st.integers(1, 30), st.integers(1, 12), st.randoms(use_true_random=False))
def test_any_number_of_ranks_and_any_order_of_arrival_give_the_same_bits(num_units, num_ranks, random):
    units = random_units(num_units)
    parts = []
    for rank in range(num_ranks):
        own = list(units_of(rank, num_ranks, num_units))
        random.shuffle(own)
        adder = TreeSum(num_units)
        for index in own:
            adder.add(index, units[index].clone())
        assert tuple(adder.nodes()) == nodes_of(units_of(rank, num_ranks, num_units), num_units)
        parts += adder.nodes().items()
    assert torch.equal(sum_nodes(parts, num_units), by_levels(units))


@given(st.integers(0, 100), st.integers(1, 20))
def test_units_are_shared_evenly_and_whole(num_units, num_ranks):
    shares = [units_of(r, num_ranks, num_units) for r in range(num_ranks)]
    assert [u for share in shares for u in share] == list(range(num_units))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sorted(map(len, shares), reverse=True) == list(map(len, shares))


def test_few_sums_are_held_at_a_time():
    adder = TreeSum(64)
    for index in range(64):
        adder.add(index, torch.ones(1))
        assert len(adder.nodes()) <= 6
    assert adder.total().item() == 64


def test_units_given_to_tree_sum_stay_as_they_are():
    units = random_units(5)
    before = [u.clone() for u in units]
    tree_sum(units)
    assert all(map(torch.equal, units, before))


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidInputError, match="at least one unit"):
        TreeSum(0)
    adder = TreeSum(3)
    adder.add(0, torch.ones(1))
    with pytest.raises(StateError, match="unit 0 is in this sum already"):
        adder.add(0, torch.ones(1))
    with pytest.raises(InvalidInputError, match="unit 3 is not one of the 3"):
        adder.add(3, torch.ones(1))
    with pytest.raises(StateError, match=r"has only those of \[\(0, 1\)\]"):
        adder.total()
    for units in (range(0, 4, 2), range(2, 5), range(-1, 1)):
        with pytest.raises(InvalidInputError, match="no contiguous range"):
            nodes_of(units, 4)
