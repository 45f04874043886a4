"""Collectives on flat buffers that are cut into one equal share a rank; without a group they are the identity.

A call returns the handle of the work under way, None when there is nothing to wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    import torch

# torch 2.13 calls them so; older versions know them by the names that it deprecates
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in a group; no group is this rank alone."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank's place in a group; no group is this rank alone."""
    return 0 if group is None else dist.get_rank(group)


def share_of(flat: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's equal share of a flat buffer, as a view."""
    share = flat.numel() // group_size(group)
    return flat.narrow(0, group_rank(group) * share, share)


def sum_whole(flat: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start to sum a buffer over all ranks, in place."""
    return None if group_size(group) == 1 else dist.all_reduce(flat, group=group, async_op=True)


def sum_shares(flat: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start to sum this rank's share of a buffer over all ranks, in place; the rest of the buffer is then of no use."""
    if group_size(group) == 1:
        return None
    work: dist.Work = _scatter(share_of(flat, group), flat, group=group, async_op=True)
    return work


def gather_shares(flat: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start to fill a buffer with the shares of all ranks, this rank's being in place already."""
    if group_size(group) == 1:
        return None
    work: dist.Work = _gather(flat, share_of(flat, group), group=group, async_op=True)
    return work
