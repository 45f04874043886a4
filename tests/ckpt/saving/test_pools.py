from __future__ import annotations

import pytest

from vescale_ckpt.saving.pools import make_pools

MIB = 1 << 20


@pytest.mark.parametrize("budget", [32 * MIB, 33 * MIB, 48 * MIB, 100 * MIB, 256 * MIB, 1000 * MIB, 1 << 40])
def test_both_pools_together_stay_within_the_budget_and_use_most_of_it(budget):
    pools = make_pools(budget)
    blocks, slabs = pools.blocks, pools.slabs
    total = blocks.most * blocks.buffer_bytes + slabs.most * slabs.buffer_bytes
    assert 0.7 * budget <= total <= budget
    assert slabs.buffer_bytes >= blocks.buffer_bytes, "what fills a block comes from two slabs at most"
    assert slabs.most >= 3
    assert blocks.most >= 3
    assert blocks.buffer_bytes >= 4 * MIB, "no tile is larger"
    assert pools.room_bytes == blocks.most * blocks.buffer_bytes


def test_without_a_budget_staging_has_no_bound_and_writing_has():
    pools = make_pools(None)
    assert pools.slabs.most is None
    assert pools.blocks.most is not None


def test_the_peak_is_that_of_both():
    pools = make_pools(32 * MIB)
    pools.slabs.take(1.0)
    held = pools.blocks.take(1.0)
    pools.blocks.give_back(held)
    assert pools.peak_bytes == pools.slabs.buffer_bytes + pools.blocks.buffer_bytes
    pools.reset_peak()
    assert pools.peak_bytes == pools.slabs.buffer_bytes
