"""Cutting an interleaved tensor into the parts that it interleaves, and joining: no rank needs another's part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from vescale_train.dmodule.layouts import is_partial, is_replicated, laid, plain, sharded_dim, wrap
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


def unbind(mesh: DeviceMesh, tensor: Tensor, dim: int = 0) -> Any:
    """``tensor.unbind``."""
    pieces = _apart(mesh, tensor, 1, dim)
    return pieces if pieces is NotImplemented else tuple(piece.squeeze(dim) for piece in pieces)


def _apart(mesh: DeviceMesh, tensor: Tensor, sizes: Any, dim: int) -> Any:
    """Return the parts: from what a rank holds, if it is these that are interleaved, else one by one.

    One by one, because torch's backward of a split fills in plain zeros for a part that nobody used, which do not mix
    with the DTensors of the others.
    """
    if not isinstance(tensor, DTensor) or is_replicated(tensor) or is_partial(tensor):
        return NotImplemented
    dim %= tensor.ndim
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        wanted = [min(sizes, length - start) for start in range(0, length, sizes)] if sizes > 0 else []
    else:
        wanted = list(sizes)
    if sum(wanted) != length:
        return NotImplemented  # a fault of the caller: torch says which
    if _interleaves(mesh, tensor, wanted, dim):
        shape = list(tensor.shape)
        shape[dim] = wanted[0]
        held = torch.split(tensor.to_local(), wanted[0] // mesh.size(), dim)
        return tuple(wrap(local, mesh, Shard(dim), shape) for local in held)
    if sharded_dim(tensor) == dim:
        return torch.split(plain(tensor), wanted, dim)
    starts = (sum(wanted[:n]) for n in range(len(wanted)))
    return tuple(tensor.narrow(dim, start, size) for start, size in zip(starts, wanted, strict=True))


def _interleaves(mesh: DeviceMesh, tensor: DTensor, wanted: list[int], dim: int) -> bool:
    """Return whether every rank holds an even share of each of these parts."""
    placement = tensor.placements[0]
    if not is_interleaved(placement) or sharded_dim(tensor) != dim:
        return False
    return len(set(wanted)) == 1 and len(wanted) == parts_of(placement) and wanted[0] % mesh.size() == 0
