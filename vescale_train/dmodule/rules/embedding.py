"""Embedding look-ups in a table that is cut by rows (the vocabulary) or by columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Shard
from torch.nn import functional

from vescale_train.dmodule.layouts import plain, sharded_dim, wrap
from vescale_train.plan.placement import is_interleaved

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def embedding(  # noqa: PLR0917 - the signature of torch's function
    mesh: DeviceMesh,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look rows up; a rank that does not hold a row brings zeros for it."""
    del norm_type
    if not isinstance(weight, DTensor) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    cut = sharded_dim(weight)
    if cut is None or is_interleaved(weight.placements[0]):
        return NotImplemented
    rows, width = weight.shape
    padding_idx = padding_idx % rows if padding_idx is not None else None
    ids = plain(input)
    if cut == 1:
        local = functional.embedding(ids, weight.to_local(), padding_idx)
        return wrap(local, mesh, Shard(ids.ndim), (*ids.shape, width))
    low = mesh.get_local_rank() * -(-rows // mesh.size())
    held = weight.to_local()
    if held.shape[0] == 0:
        local = held.new_zeros((*ids.shape, width)) + held.sum()  # no rows, but a place in the graph
        return wrap(local, mesh, Partial(), (*ids.shape, width))
    mine = (ids >= low) & (ids < low + held.shape[0])
    local_padding = padding_idx - low if padding_idx is not None and 0 <= padding_idx - low < held.shape[0] else None
    local = functional.embedding((ids - low).masked_fill(~mine, 0), held, local_padding)
    return wrap(local.masked_fill(~mine.unsqueeze(-1), 0.0), mesh, Partial(), (*ids.shape, width))
