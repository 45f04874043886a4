from __future__ import annotations

import pytest
import torch

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.state.leaf import Holding, LeafKind, Piece, TensorLeaf


def test_a_leaf_holds_views_of_boxes_of_the_global_tensor():
    memory = torch.arange(12.0).reshape(4, 3)
    piece = Piece(Box((2, 0), (2, 3)), memory[2:])
    leaf = TensorLeaf(("w",), torch.float32, (4, 3), (piece,), holding=Holding.SHARDED)
    assert leaf.pieces[0].view.data_ptr() == memory[2:].data_ptr()
    assert leaf.kind is LeafKind.TENSOR
    assert leaf.alias_of is None


def test_strides_do_not_matter():
    memory = torch.arange(12.0).reshape(4, 3).t()
    TensorLeaf(("w",), torch.float32, (3, 4), (Piece(Box.whole((3, 4)), memory),))


def test_a_piece_must_have_the_shape_of_its_box():
    with pytest.raises(LayoutError, match=r"\(2, 3\)"):
        Piece(Box((0, 0), (3, 2)), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((2, 2), torch.float32, "'a.w' has the shape"),
        ((3,), torch.float32, "'a.w' has the shape"),
        ((2, 3), torch.float64, "'a.w' is torch.float64"),
    ],
)
def test_pieces_must_lie_in_the_tensor_and_have_its_dtype(shape, dtype, says):
    with pytest.raises(LayoutError, match=says):
        TensorLeaf(("a", "w"), dtype, shape, (Piece(Box((0, 0), (2, 3)), torch.ones(2, 3)),))


def test_an_alias_brings_no_memory():
    TensorLeaf(("b",), torch.float32, (2,), (), alias_of=("a",))
    with pytest.raises(LayoutError, match="'b' is an alias of 'a'"):
        TensorLeaf(("b",), torch.float32, (2,), (Piece(Box.whole((2,)), torch.ones(2)),), alias_of=("a",))
