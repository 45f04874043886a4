"""Placements of a plan: torch's own, one spelling for the interleaved one, and their form in JSON."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from vescale_train.errors import PlanError
from vescale_train.torch_private import StridedShard

__all__ = [
    "Interleaved",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "decode",
    "encode",
    "is_interleaved",
    "parts_of",
]


def Interleaved(dim: int, parts: int) -> Placement:  # noqa: N802 - reads as the placements beside it do
    """Return the placement that cuts each of ``parts`` equal parts of a dim over the ranks, as fused QKV needs.

    Of a dim ``[q | k | v]`` every rank holds its share of q, of k and of v, in this order.
    """
    if parts < 1:
        raise PlanError(f"cannot interleave {parts} parts: 1 or more are needed")
    placement: Placement = StridedShard(dim, split_factor=parts)
    return placement


def is_interleaved(placement: Placement) -> bool:
    """Return whether it was made by ``Interleaved``."""
    return isinstance(placement, StridedShard)


def parts_of(placement: Placement) -> int:
    """Return into how many parts a dim is cut before each is shared out; 1 for a plain ``Shard``."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def encode(placement: Placement) -> dict[str, Any]:
    """Return the placement as JSON.

    Raises:
        PlanError: for a placement that plans do not know.
    """
    if isinstance(placement, StridedShard):
        return {"kind": "interleaved", "dim": placement.dim, "parts": parts_of(placement)}
    if type(placement) is Shard:
        return {"kind": "shard", "dim": placement.dim}
    if type(placement) is Replicate:
        return {"kind": "replicate"}
    raise PlanError(f"a plan cannot hold {placement!r}: use Replicate(), Shard(dim) or Interleaved(dim, parts)")


def decode(record: Any) -> Placement:
    """Return the placement that ``encode`` wrote.

    Raises:
        PlanError: if the record is not of that form.
    """
    match record:
        case {"kind": "replicate", **rest} if not rest:
            return Replicate()
        case {"kind": "shard", "dim": int(dim), **rest} if not rest:
            return Shard(dim)
        case {"kind": "interleaved", "dim": int(dim), "parts": int(parts), **rest} if not rest:
            return Interleaved(dim, parts)
    raise PlanError(f"cannot read a placement from {record!r}: not of the form that plans are written in")
