"""The few moves between plain tensors and DTensors; inside a parallel model, plain means the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from vescale_train.plan.placement import Interleaved, is_interleaved, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh


def is_replicated(tensor: DTensor) -> bool:
    """Return whether every rank holds the whole tensor."""
    return all(isinstance(one, Replicate) for one in tensor.placements)


def is_partial(tensor: object) -> TypeGuard[DTensor]:
    """Return whether it is a DTensor whose ranks hold terms of a sum."""
    return isinstance(tensor, DTensor) and any(isinstance(one, Partial) for one in tensor.placements)


def plain(tensor: Tensor) -> Tensor:
    """Return the whole tensor as a plain one; its gradient is taken to be the same on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor if is_replicated(tensor) else tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return whole.to_local()


def laid(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a tensor as a DTensor with these placements; a plain one is taken to be the same on every rank."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return tensor if tensor.placements == tuple(placements) else tensor.redistribute(placements=placements)


def wrap(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
    """Return the DTensor of global ``shape`` of which each rank brings its part."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def sharded_dim(tensor: Tensor) -> int | None:
    """Return the dim along which a tensor is cut over the one axis of its mesh; None for a plain or whole one."""
    if not isinstance(tensor, DTensor):
        return None
    placement = tensor.placements[0]
    if isinstance(placement, Shard) or is_interleaved(placement):
        dim: int = placement.dim  # type: ignore[attr-defined]
        return dim % tensor.ndim
    return None


def cut_as(placement: Placement, dim: int) -> Placement:
    """Return the placement that cuts another dim in the way this one cuts its own."""
    if is_interleaved(placement):
        return Interleaved(dim, parts_of(placement))
    return Shard(dim)


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a value with every tensor in it changed, also those inside lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(change, one) for one in value)
    if isinstance(value, tuple):  # a named one, such as what max(dim) returns
        return (
            type(value)(*(mapped(change, one) for one in value))
            if hasattr(value, "_fields")
            else type(value)([mapped(change, one) for one in value])
        )
    if type(value) is dict:
        return {key: mapped(change, one) for key, one in value.items()}
    return value
