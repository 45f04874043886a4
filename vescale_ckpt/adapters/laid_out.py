"""Laid out: a local tensor together with a layout of our own, for trainers that keep no DTensors.

Fused weights cut by section, flat buckets of an optimizer, ragged shards: what a mesh axis does to them is a placement,
and this turns it into explicit offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_ckpt.adapters.tensors import pieces_of
from vescale_ckpt.state.sharded_view import ShardedView

if TYPE_CHECKING:
    import torch

    from vescale_ckpt.layout.layout import Layout


def laid_out(
    local: torch.Tensor, layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> ShardedView:
    """Return what the rank at a coordinate holds of a tensor, as views of its local memory.

    Raises:
        LayoutError: the local tensor has not the shape that the layout gives it.
    """
    pieces = pieces_of(local.detach(), layout, tuple(global_shape), tuple(coordinate))
    return ShardedView(tuple(global_shape), local.dtype, [(piece.box.offset, piece.view) for piece in pieces])
