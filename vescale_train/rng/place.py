"""Where the numbers of a local tensor stand in the tensor of one device: pieces of it, each a box of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vescale_ckpt.adapters.tensors import dtensor_layout
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import spans
from vescale_train.errors import InvalidInputError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Says that tensors of this process are parts of larger ones along a dim, as the batch is under data parallel."""

    dim: int
    start: int
    count: int
    total: int

    def __post_init__(self) -> None:
        if self.dim < 0 or not 0 <= self.start <= self.start + self.count <= self.total or self.count < 1:
            raise InvalidInputError(
                f"elements {self.start} to {self.start + self.count} of {self.total} along dim {self.dim} are no part"
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """A view of local memory, and the box of the whole tensor that it is."""

    box: Box
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """All that a process holds of a tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    pieces: tuple[Piece, ...]

    def within(self, cuts: Iterable[Cut]) -> Place:
        """Return the place in the larger tensor that the cuts say this one is part of.

        Raises:
            LayoutError: a dim does not hold a whole number of indexes for each one of the cut.
        """
        place = self
        for cut in cuts:
            place = place._within(cut)
        return place

    def _within(self, cut: Cut) -> Place:
        if cut.dim >= len(self.shape) or math.prod(self.shape) == 0:
            return self
        width, rest = divmod(self.shape[cut.dim], cut.count)
        if rest or not width:
            raise LayoutError(
                f"cannot draw a tensor of shape {self.shape} as part of the whole batch: dim {cut.dim} does not divide "
                f"into the {cut.count} elements that this process holds; draw it in `with rng.shared():` if it is the "
                f"same on all ranks, or say which dim is cut"
            )
        by = tuple(cut.start * width if dim == cut.dim else 0 for dim in range(len(self.shape)))
        shape = tuple(cut.total * width if dim == cut.dim else n for dim, n in enumerate(self.shape))
        return Place(shape, tuple(replace(piece, box=piece.box.shifted(by)) for piece in self.pieces))


def place_of_plain(tensor: torch.Tensor) -> Place:
    """Return the place of a tensor that is whole."""
    shape = tuple(tensor.shape)
    return Place(shape, (Piece(Box.whole(shape), tensor),))


def place_of_dtensor(tensor: DTensor, local: torch.Tensor, what: str) -> Place:
    """Return the place of what this rank holds of a DTensor; no pieces on a rank that is not of its mesh.

    Raises:
        LayoutError: a placement such as a pending sum, of which a rank holds no box.
    """
    layout = dtensor_layout(tensor, what)
    coordinate = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if coordinate is None:
        return Place(shape, ())
    pieces = (Piece(span.box, span.view_of(local)) for span in spans(layout, shape, tuple(coordinate)))
    return Place(shape, tuple(piece for piece in pieces if piece.memory.numel()))
