"""The loss of a step: the mean over all of its micro-batches, the same number on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_train.comm import TreeSum, canonical_all_reduce, units_of
from vescale_train.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh


def plain(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss as a detached float32 scalar; of a DTensor, the whole."""
    detached = loss.detach()
    whole: torch.Tensor = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return whole.reshape(()).float()


def mean_loss(losses: Sequence[torch.Tensor], group: DeviceMesh | None, *, exact: bool) -> torch.Tensor:
    """Return the mean of the losses of all ranks' micro-batches; collective over the data-parallel ranks.

    Args:
        losses: float32 of any one shape, one for each micro-batch of this rank; every rank has as many.
        group: the data-parallel ranks; None: this rank has all.
        exact: sum in the fixed tree over the index of the micro-batch, whatever the number of ranks.

    Raises:
        InvalidInputError: there is no loss.
    """
    if not losses:
        raise InvalidInputError("cannot take the mean loss of no micro-batch")
    num_ranks, rank = (1, 0) if group is None else (group.size(), group.get_local_rank())
    total_number = len(losses) * num_ranks
    if not exact:
        total = torch.stack(list(losses)).sum(0)
        if group is not None and num_ranks > 1:
            dist.all_reduce(total, group=group.get_group())
        return total / total_number
    units = TreeSum(total_number)
    for index, loss in zip(units_of(rank, num_ranks, total_number), losses, strict=True):
        units.add(index, loss.clone())
    if group is None or num_ranks == 1:
        return units.total() / total_number
    return canonical_all_reduce(units, group.get_group()) / total_number
