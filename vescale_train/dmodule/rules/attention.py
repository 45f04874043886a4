"""Scaled dot product attention by heads or by samples: every rank attends with what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.nn import functional

from vescale_train.dmodule.layouts import laid, plain, sharded_dim, wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HEADS = 1


def attention(  # noqa: PLR0913, PLR0917 - the signature of torch's function
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend; query, key and value are [batch, heads, time, width], and there may be fewer heads of key and value.

    With dropout, or where heads cannot be shared out evenly, every rank attends for all heads: dropout on a part would
    not drop what one device drops.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    num_heads = query.shape[_HEADS] if query.ndim == 4 else 0
    by_heads = any(sharded_dim(one) == _HEADS for one in (query, key, value))
    if dropout_p or not by_heads or num_heads % mesh.size():
        mask = None if attn_mask is None else plain(attn_mask)
        return functional.scaled_dot_product_attention(
            plain(query), plain(key), plain(value), mask, dropout_p, enable_gqa=enable_gqa, **options
        )
    local_query = laid(query, mesh, [Shard(_HEADS)]).to_local()
    local_key, local_value = (_for_my_heads(mesh, one, num_heads) for one in (key, value))
    mask = None if attn_mask is None else _my_mask(mesh, attn_mask, num_heads)
    local = functional.scaled_dot_product_attention(
        local_query,
        local_key,
        local_value,
        mask,
        enable_gqa=local_key.shape[_HEADS] != local_query.shape[_HEADS],
        **options,
    )
    return wrap(local, mesh, Shard(_HEADS), (*query.shape[:-1], value.shape[-1]))


def _for_my_heads(mesh: DeviceMesh, tensor: Tensor, num_heads: int) -> Tensor:
    """Return the heads of key or value that this rank's heads of the query attend to."""
    num_mine = tensor.shape[_HEADS]
    if num_mine % mesh.size() == 0:
        return laid(tensor, mesh, [Shard(_HEADS)]).to_local()
    share = num_heads // mesh.size()
    first = mesh.get_local_rank() * share
    device = tensor.device
    wanted = torch.arange(first, first + share, device=device) // (num_heads // num_mine)
    whole = laid(tensor, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    return whole.index_select(_HEADS, wanted)


def _my_mask(mesh: DeviceMesh, mask: Tensor, num_heads: int) -> Tensor:
    """Return the mask of this rank's heads; one that is the same for all heads is used by all ranks."""
    if mask.ndim == 4 and mask.shape[_HEADS] == num_heads:
        return laid(mask, mesh, [Shard(_HEADS)]).to_local()
    if isinstance(mask, DTensor) or mask.requires_grad:
        return laid(plain(mask), mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    return mask
