"""Which operations a ragged ``DTensor`` takes: those that treat each element by itself, and copies.

Torch does not know the placement; it would run a sum or a product on the local part and call that the whole. So the
others are refused until the tensor is redistributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vescale_train.errors import LayoutError
from vescale_train.ragged.placement import RaggedShard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.tensor.placement_types import Placement

_aten: Any = torch.ops.aten

_COPIES: Final = frozenset(
    {
        _aten.detach.default,
        _aten.alias.default,
        _aten.clone.default,
        _aten._to_copy.default,  # noqa: SLF001 - the name of Tensor.to
        _aten.copy_.default,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
    }
)


def ragged_result(op: Any, specs: list[Any]) -> tuple[Placement, ...] | None:
    """Return the placements of the result of an operation on ragged shards, None if none of its arguments is one.

    Args:
        op: the overload.
        specs: of each ``DTensor`` among its arguments; a number in one of them is the same on all ranks.

    Raises:
        LayoutError: it is not done element by element, or on layouts that differ.
    """
    layouts = [tuple(spec.placements) for spec in specs if spec.ndim or _is_ragged(spec.placements)]
    ragged = next((cuts for cuts in layouts if _is_ragged(cuts)), None)
    if ragged is None:
        return None
    if op not in _COPIES and (torch.Tag.pointwise not in op.tags or len(op._schema.returns) != 1):  # noqa: SLF001
        raise LayoutError(
            f"cannot run {op} on {ragged}: a rank would take its part for the whole; redistribute it to Replicate or a "
            f"Shard first, or work on to_local()"
        )
    if any(cuts != ragged for cuts in layouts):
        raise LayoutError(f"cannot run {op} on different layouts {layouts}: redistribute to one of these first")
    return ragged


def _is_ragged(placements: Iterable[Placement]) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in placements)
