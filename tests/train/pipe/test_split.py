from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.split import cut_at, cut_balanced, cut_by_cost, cut_evenly, stages_of

COSTS = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9)


def dearest(costs, cuts):
    return max(sum(costs[start:end]) for start, end in itertools.pairwise(cuts))


def every_cut(num_units, num_stages):
    return [(0, *inner, num_units) for inner in itertools.combinations(range(1, num_units), num_stages - 1)]


@pytest.mark.parametrize(("layers", "stages"), [(7, 3), (70, 12), (30, 4), (1, 1), (43, 8), (14, 6), (140, 24)])
def test_even_cuts_are_a_bijection_and_lose_no_layer(layers, stages):
    placed = stages_of(cut_evenly(layers + 3, range(2, layers + 2), stages))
    assert len(placed) == layers + 3
    assert placed == sorted(placed)
    counts = [placed[2 : layers + 2].count(stage) for stage in range(stages)]
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert placed[:2] == [0, 0]
    assert placed[-1] == stages - 1


def test_fewer_layers_than_stages_are_refused():
    for make in (lambda: cut_evenly(2, range(2), 3), lambda: cut_by_cost([1.0, 1.0], 3)):
        with pytest.raises(SplitError, match="into 3 stages: each needs one at least"):
            make()


@given(COSTS, st.data())
def test_cuts_by_cost_are_the_best_there_are(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = cut_by_cost(costs, num_stages)
    assert cuts in every_cut(len(costs), num_stages)
    assert dearest(costs, cuts) == min(dearest(costs, other) for other in every_cut(len(costs), num_stages))


@given(COSTS, st.data())
def test_balanced_cuts_even_out_the_ranks(costs, data):
    num_ranks = data.draw(st.integers(1, max(1, len(costs) // 2)))
    chunks = 2 if len(costs) >= 2 * num_ranks else 1
    num_stages = num_ranks * chunks

    def dearest_rank(cuts):
        stages = [sum(costs[start:end]) for start, end in itertools.pairwise(cuts)]
        return max(sum(stages[rank::num_ranks]) for rank in range(num_ranks))

    cuts = cut_balanced(costs, num_stages, lambda stage: stage % num_ranks)
    assert cuts in every_cut(len(costs), num_stages)
    assert dearest_rank(cuts) <= dearest_rank(cut_by_cost(costs, num_stages))


def test_cuts_at_names():
    units = ("a", "b", "c", "d")
    assert cut_at(units, ("b", "d"), 3) == (0, 1, 3, 4)
    for points, stages, reason in [
        (("x",), 2, "no such units; the units are a, b, c, d"),
        (("b",), 3, "at 1 points; that makes 2"),
        (("b",), 1, "at 1 points; that makes 2"),
        (("c", "b"), 3, "out of order"),
        (("a",), 2, "a stage would be empty"),
    ]:
        with pytest.raises(SplitError, match=reason):
            cut_at(units, points, stages)
