from __future__ import annotations

import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.placement import (
    Boxes,
    Flat,
    Interleaved,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    num_positions,
)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Shard(0, sizes=(1, -1)),
        lambda: StridedShard(0, 0),
        lambda: Interleaved(0, (3, -1)),
        lambda: Flat(((2, 1),)),
        lambda: Flat(((-1, 1),)),
        lambda: Ragged((), (1,)),
        lambda: Ragged((1,), (1,)),
        lambda: Ragged((0, 2), (1,)),
        lambda: Ragged((0,), (1, -1)),
    ],
)
def test_nonsense_is_refused_at_once(wrong) -> None:
    with pytest.raises(LayoutError, match=r"\("):
        wrong()


def test_a_placement_knows_the_axis_it_was_written_for() -> None:
    assert num_positions(Shard(0, sizes=(1, 4, 2))) == 3
    assert num_positions(Flat(((0, 1), (1, 2)))) == 2
    assert num_positions(Ragged((0,), (1, 2, 3, 4))) == 4
    assert num_positions(Boxes((Box((), ()),))) == 1
    assert {num_positions(p) for p in (Replicate(), Shard(0), StridedShard(0, 2), Interleaved(0, (1,)))} == {None}


def test_a_tensor_in_a_bucket_gets_its_part_of_each_shard() -> None:
    # A bucket of 4 x 10 elements; the tensor is at 13..32.
    assert Flat.in_bucket(13, 19, 10, 4) == Flat(((0, 0), (0, 7), (7, 17), (17, 19)))
    assert Flat.in_bucket(0, 10, 10, 4) == Flat(((0, 10), (0, 0), (0, 0), (0, 0)))
    assert Flat.in_bucket(38, 0, 10, 4) == Flat(((0, 0),) * 4)
    # The bucket ends before the tensor does: what is beyond is on no rank, and the cover check will say so.
    assert Flat.in_bucket(38, 9, 10, 4).ranges[-1] == (0, 2)
