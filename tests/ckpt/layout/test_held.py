from __future__ import annotations

import pytest

from vescale_ckpt.layout.held import Held, take, total
from vescale_ckpt.layout.placement import Flat, Shard, StridedShard


@pytest.mark.parametrize(
    ("start", "stop", "taken"),
    [
        (0, 6, ((0, 2), (5, 9))),
        (1, 3, ((1, 2), (5, 6))),
        (2, 2, ()),
        (2, 5, ((5, 8),)),
        (0, 2, ((0, 2),)),
        (5, 99, ((8, 9),)),
    ],
)
def test_take_counts_in_what_is_held(start, stop, taken) -> None:
    ranges = ((0, 2), (5, 9))
    assert total(ranges) == 6
    assert take(ranges, start, stop) == taken


def test_adjacent_ranges_become_one() -> None:
    # Two strided cuts that undo each other leave one range, not many that touch.
    held = Held.whole((12,)).cut(StridedShard(0, 3), 1, 0)
    assert held.dims == (((0, 12),),)


def test_an_empty_dim_holds_no_range() -> None:
    held = Held.whole((0, 4)).cut(Shard(0), 3, 1)
    assert held.dims == ((), ((0, 4),))
    assert held.local_shape == (0, 4)


def test_flattening_one_dim_is_a_cut_of_it() -> None:
    held = Held.whole((10,)).cut(Flat(((0, 4), (4, 10))), 2, 1)
    assert held.num_folded is None
    assert held.dims == (((4, 10),),)
