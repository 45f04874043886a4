"""What a plan costs."""

from __future__ import annotations

import math

from tests.train.plan.net import NAMES, NET
from vescale_train.plan import Plan, Replicate, Shard, estimate, resolve

CUT = {
    "parameter": {
        r"words\.weight": [Shard(0)],
        r"layers\.\d+\.(gate|up)_proj\.(weight|bias)": [Shard(0)],
        r"layers\.\d+\.down_proj\.weight": [Shard(1)],
    }
}


def cost(plan, num_ranks):
    return estimate(resolve(Plan.of(plan), NAMES, num_ranks), NAMES, num_ranks)


def test_nothing_cut_is_all_held_and_nothing_sent():
    found = cost({}, 4)
    assert found.whole_bytes == found.rank_bytes == 4 * sum(math.prod(p.shape) for p in NET.parameters())
    assert found.share == 1
    assert found.forward_bytes == found.backward_bytes == 0


def test_memory_is_that_of_the_rank_that_holds_most():
    whole = 2 * 8 + 3 * 8 + 8 + 8
    assert cost(CUT, 4).rank_bytes == 4 * (whole + 10 * 8 + 3 * (6 * 8 * 3 + 6))
    assert (
        cost({"parameter": {r"words\.weight": [Shard(0)]}}, 3).rank_bytes
        - cost({"parameter": {r"words\.weight": [Shard(0)]}}, 4).rank_bytes
        == 4 * (14 - 10) * 8
    )


def test_a_row_cut_sums_outputs_and_a_column_cut_sums_gradients_of_inputs():
    found = cost(CUT, 2)
    assert found.forward_bytes == 4 * (8 + 3 * 8)
    assert found.backward_bytes == 4 * (3 * 2 * 8 + 8)
    assert cost(CUT, 1).forward_bytes == cost(CUT, 1).backward_bytes == 0


def test_layers_that_share_an_input_edge_share_the_sum_of_its_gradient():
    joined = {**CUT, "forward": {r"layers\.\d+\.input": [[Replicate()]]}}
    assert cost(joined, 2).backward_bytes == 4 * (3 * 8 + 8)
