from __future__ import annotations

import pytest
import torch

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.state.sharded_view import ShardedView


def test_pieces_are_boxes_of_the_global_tensor():
    view = ShardedView([8, 3], torch.float32, [((1, 0), torch.zeros(4, 3)), ((7, 1), torch.zeros(1, 2))])
    assert view.global_shape == (8, 3)
    assert view.boxes == (Box((1, 0), (4, 3)), Box((7, 1), (1, 2)))


def test_a_rank_may_hold_nothing_or_a_scalar():
    assert ShardedView((4,), torch.float32).boxes == ()
    assert ShardedView((), torch.float32, [((), torch.tensor(1.0))]).boxes == (Box((), ()),)


@pytest.mark.parametrize(
    ("shape", "pieces", "reason"),
    [
        ((4,), [((2,), torch.zeros(3))], "not inside"),
        ((4,), [((0, 0), torch.zeros(2, 2))], "not inside"),
        ((4, 4), [((0,), torch.zeros(2))], "not inside"),
        ((4,), [((0,), torch.zeros(2, dtype=torch.float64))], "float64"),
        ((4,), [((0,), torch.zeros(3)), ((2,), torch.zeros(2))], "overlap"),
        ((4,), [((-1,), torch.zeros(2))], "negative"),
        ((4,), [((0, 0), torch.zeros(2))], "dims"),
    ],
)
def test_contradictions_are_refused(shape, pieces, reason):
    with pytest.raises(LayoutError, match=reason):
        ShardedView(shape, torch.float32, pieces)
