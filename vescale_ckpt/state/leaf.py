"""A tensor leaf: what this rank holds of one tensor, as boxes of the global tensor with views of local memory.

Every adapter speaks this on its upper side and every plan on its lower side, so a new layout is a new way to make
pieces and nothing else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    import torch

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.state.tree import Path


class LeafKind(enum.StrEnum):
    """What a stored array is to the user."""

    TENSOR = "tensor"
    NUMPY = "numpy"
    BYTES = "bytes"
    BYTES_IO = "bytes_io"


class Holding(enum.StrEnum):
    """How the ranks together hold a leaf."""

    SHARDED = "sharded"
    """A mesh or explicit offsets say who holds which box; other ranks may hold none of it."""
    REPLICATED = "replicated"
    """Every rank that has the key holds all of it, and the copies must agree."""
    PER_RANK = "per_rank"
    """The path names the rank; only that rank holds it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of the global tensor and the local memory that holds it."""

    box: Box
    view: torch.Tensor
    """Shape ``box.shape``, the leaf's dtype, any strides, any device; a view, never a copy, of the caller's memory."""

    def __post_init__(self) -> None:
        if tuple(self.view.shape) != self.box.shape:
            raise LayoutError(f"piece {self.box} comes with memory of shape {tuple(self.view.shape)}")


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """What this rank holds of one tensor; ``pieces`` is empty where it holds none of it."""

    path: Path
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    kind: LeafKind = LeafKind.TENSOR
    holding: Holding = Holding.REPLICATED
    alias_of: Path | None = None
    """The path, in the same state, of an earlier leaf that is the same memory (a tie); its pieces are then empty."""

    def __post_init__(self) -> None:
        if self.alias_of is not None and self.pieces:
            raise LayoutError(f"{fqn(self.path)!r} is an alias of {fqn(self.alias_of)!r} and brings memory of its own")
        for piece in self.pieces:
            if piece.view.dtype != self.dtype:
                raise LayoutError(f"{fqn(self.path)!r} is {self.dtype}, its piece {piece.box} is {piece.view.dtype}")
            if len(piece.box.offset) != len(self.global_shape) or any(
                end > n for end, n in zip(piece.box.end, self.global_shape, strict=True)
            ):
                raise LayoutError(f"{fqn(self.path)!r} has the shape {self.global_shape}, its piece is {piece.box}")
