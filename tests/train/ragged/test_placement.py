from __future__ import annotations

import pytest

from vescale_ckpt.layout.placement import Ragged
from vescale_train.errors import LayoutError
from vescale_train.ragged import RaggedShard


def test_it_is_a_value_that_is_none_of_torchs():
    one, other = RaggedShard((0, 1), (1, 2)), RaggedShard([0, 1], [1, 2])
    assert one == other
    assert hash(one) == hash(other)
    assert one != RaggedShard((0,), (1, 2))
    assert not (one.is_shard())
    assert not (one.is_shard(0))
    assert not (one.is_replicate())
    assert not (one.is_partial())
    assert not (one.is_partial("sum"))
    assert one.checkpoint_placement() == Ragged((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((1,), (1, 1), "dims must be"),
        ((), (1,), "dims must be"),
        ((0,), (-1, 2), "negative"),
        ((0,), (0, 0), "no rank"),
    ],
)
def test_what_is_no_cut_is_refused(dims, units, message):
    with pytest.raises(LayoutError, match=message):
        RaggedShard(dims, units)
