"""The loss of a minibatch: weighted micro-batches, added up in one order, told to every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

    from vescale_train.pipe.stage import PipeStage

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def scaled(loss: torch.Tensor, share: Fraction, reduction: str) -> torch.Tensor:
    """Return a micro-batch's loss with its weight: its share of the samples for a mean, 1 for a sum.

    Equal micro-batches are divided by their number, as a loop over micro-batches does.
    """
    if reduction == "sum" or share == 1:
        return loss
    return loss / share.denominator if share.numerator == 1 else loss * (share.numerator / share.denominator)


def total(losses: torch.Tensor) -> torch.Tensor:
    """Add up losses from the first to the last."""
    result = losses[0].clone()
    for number in range(1, len(losses)):
        result += losses[number]
    return result


def share_losses(stage: PipeStage, losses: Mapping[int, torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return the losses of all micro-batches on every rank, in order; None if there are none."""
    place, number = stage.place, stage.plan.num_microbatches
    mine = torch.stack([losses[n] for n in sorted(losses)]).reshape(-1) if losses else None
    if place.num_ranks == 1:
        return mine
    told = torch.full((number + 1,), -1.0, dtype=torch.float64, device=device)
    if mine is not None:
        told[:number] = mine
        told[number] = _DTYPES.index(mine.dtype)
    source = stage.plan.rank_of(stage.num_stages - 1, place.num_ranks)
    dist.broadcast(told, group=place.group, group_src=source)
    dtype = int(told[number].item())
    return None if dtype < 0 else told[:number].to(_DTYPES[dtype])
