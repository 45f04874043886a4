"""Questions about the layout of DTensors that more than one check asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial

if TYPE_CHECKING:
    from collections.abc import Iterator


def dtensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[DTensor]:
    """Yield the DTensors among arguments, and in lists of them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, DTensor))


def sharded_dims(tensor: DTensor) -> frozenset[int]:
    """Return the dims that are cut over more than one rank."""
    sizes = tensor.device_mesh.shape
    cuts = (getattr(p, "dim", None) for p, size in zip(tensor.placements, sizes, strict=True) if size > 1)
    return frozenset(dim % max(tensor.ndim, 1) for dim in cuts if dim is not None)


def is_pending(tensor: DTensor) -> bool:
    """Return whether a sum, mean or other reduction over more than one rank is still to be made."""
    sizes = tensor.device_mesh.shape
    return any(isinstance(p, Partial) and size > 1 for p, size in zip(tensor.placements, sizes, strict=True))


def shares_memory(a: DTensor, b: DTensor) -> bool:
    """Return whether the local parts of two DTensors are in one storage."""
    with torch.no_grad():
        first, second = a.to_local(), b.to_local()
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def describe(tensor: DTensor) -> str:
    """Return shape, placements and mesh for a message."""
    return (
        f"a tensor of shape {tuple(tensor.shape)} as {tuple(tensor.placements)} over {tuple(tensor.device_mesh.shape)}"
    )
