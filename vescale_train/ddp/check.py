"""The start of data parallelism: ranks that begin with other parameters never train the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vescale_train.ddp.collectives import group_size
from vescale_train.ddp.local import local_of
from vescale_train.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_equal_start(parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Refuse parameters that are not equal on all ranks of a group; one small collective.

    Compared are the sum and the sum of squares of each, in float64. Parameters on the meta device have no values yet.

    Raises:
        InvalidInputError: some differ; says which.
    """
    if group_size(group) == 1:
        return
    marks = [mark for tensor in parameters.values() for mark in _marks(local_of(tensor))]
    mine = torch.stack(marks)
    # nan has no order: two ranks that both hold nan are left to the loss
    both = torch.nan_to_num(torch.cat([mine, -mine]), nan=0.0)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    highest, lowest = both[: len(marks)], -both[len(marks) :]
    differing = (highest != lowest).view(-1, 2).any(1).tolist()
    names = [name for name, differs in zip(parameters, differing, strict=True) if differs]
    if names:
        raise InvalidInputError(
            f"cannot start data parallelism: {len(names)} of {len(parameters)} parameters differ between ranks "
            f"({', '.join(names[:5])}); initialise with one seed on all ranks, or load a checkpoint first"
        )


def _marks(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if tensor.is_meta:
        zero = torch.zeros((), dtype=torch.float64)
        return zero, zero
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.sum(dtype=torch.float64), torch.linalg.vector_norm(real.float(), dtype=torch.float64)
