"""Sharded views: local tensors with explicit places in a global tensor, for layouts that no mesh describes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout, local_shape, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True)
class ShardedView:
    """What this rank holds of a tensor: each local tensor with the offset of its first element in the global one.

    The global shape is stated and never worked out from what ranks hold. A rank that holds nothing passes no pieces.
    Ranks that pass the same box hold replicas of it. A load fills the local tensors in place.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[tuple[Sequence[int], torch.Tensor]] = ()
    """(offset, local tensor); the local tensors of one rank must not overlap."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(int(size) for size in self.global_shape))
        object.__setattr__(self, "pieces", tuple((tuple(int(o) for o in at), local) for at, local in self.pieces))
        boxes = self.boxes
        whole = Box.whole(self.global_shape)
        for box, (_, local) in zip(boxes, self.pieces, strict=True):
            if local.dtype != self.dtype:
                raise LayoutError(f"sharded view of {self.dtype} has a piece of {local.dtype} at {box.offset}")
            if box.ndim != whole.ndim or not _inside(box, whole):
                raise LayoutError(
                    f"sharded view: piece at offset {box.offset} of shape {box.shape} is not inside the global shape "
                    f"{self.global_shape}; state the global shape and offsets in elements, per dim"
                )
        for one, other in itertools.combinations(boxes, 2):
            if one.intersect(other) is not None:
                raise LayoutError(
                    f"sharded view of shape {self.global_shape}: pieces at {one.offset} of shape {one.shape} and at "
                    f"{other.offset} of shape {other.shape} overlap; pass each element once"
                )

    @classmethod
    def laid_out(
        cls, local: torch.Tensor, global_shape: Sequence[int], layout: Layout, coordinate: Sequence[int]
    ) -> ShardedView:
        """Return the view of a local tensor that a layout describes: interleaved, flat, ragged, or any nesting.

        Args:
            local: this rank's memory, contiguous where the layout flattens; padding left off.
            global_shape: of the whole tensor.
            layout: mesh and placements (``vescale_ckpt.layout``).
            coordinate: this rank's, per mesh axis.

        Raises:
            LayoutError: the local tensor has not the shape that the layout gives it here.
        """
        shape, at = tuple(global_shape), tuple(coordinate)
        expected = local_shape(layout, shape, at)
        if tuple(local.shape) != expected:
            raise LayoutError(
                f"shape {shape} laid out by {layout.placements} on mesh {layout.mesh_shape} gives coordinate {at} a "
                f"local tensor of shape {expected}, but it holds {tuple(local.shape)}"
            )
        pieces = [(span.box.offset, span.view_of(local.detach())) for span in spans(layout, shape, at)]
        return cls(shape, local.dtype, pieces)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each piece in the global tensor, in the order of ``pieces``."""
        return tuple(Box(tuple(at), tuple(local.shape)) for at, local in self.pieces)


def _inside(box: Box, whole: Box) -> bool:
    return all(end <= size for end, size in zip(box.end, whole.shape, strict=True))
