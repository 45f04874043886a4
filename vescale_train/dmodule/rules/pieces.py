"""Cutting an interleaved tensor into the parts that it interleaves, and joining: no rank needs another's part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from vescale_train.dmodule.layouts import laid, sharded_dim, wrap
from vescale_train.plan.placement import is_interleaved, parts_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split(mesh: DeviceMesh, tensor: Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    """``tensor.split``: fused queries, keys and values come apart."""
    return _apart(mesh, tensor, split_size_or_sections, dim)


def method_split(mesh: DeviceMesh, tensor: Tensor, split_size: Any, dim: int = 0) -> Any:
    """``Tensor.split``, whose argument has another name."""
    return _apart(mesh, tensor, split_size, dim)


def chunk(mesh: DeviceMesh, tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    """``tensor.chunk``."""
    return _apart(mesh, tensor, -(-tensor.shape[dim] // chunks), dim)


def cat(mesh: DeviceMesh, tensors: Any, dim: int = 0) -> Any:
    """``torch.cat``, which lets an empty list of numbers join anything; caches of keys and values begin with one."""
    kept = [one for one in tensors if one.ndim != 1 or one.numel()]
    if len(kept) == len(tensors) or not kept:
        return NotImplemented
    return torch.cat([laid(one, mesh, [Replicate()]) if not isinstance(one, DTensor) else one for one in kept], dim)


def _apart(mesh: DeviceMesh, tensor: Tensor, sizes: Any, dim: int) -> Any:
    """Return the parts, if it is these that are interleaved along this dim and each is shared out evenly."""
    if not isinstance(tensor, DTensor) or not is_interleaved(tensor.placements[0]):
        return NotImplemented
    dim %= tensor.ndim
    num_parts = parts_of(tensor.placements[0])
    part, left = divmod(tensor.shape[dim], num_parts)
    wanted = [sizes] * -(-tensor.shape[dim] // sizes) if isinstance(sizes, int) else list(sizes)
    if sharded_dim(tensor) != dim or left or part % mesh.size() or wanted != [part] * num_parts:
        return NotImplemented
    shape = list(tensor.shape)
    shape[dim] = part
    locals_ = torch.split(tensor.to_local(), part // mesh.size(), dim)
    return tuple(wrap(local, mesh, Shard(dim), shape) for local in locals_)
