"""How stages are wrapped, as far as schedules and tied gradients have to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vescale_train.pipe.schedules import Sharding
from vescale_train.pipe.torch_fsdp import reshards_after_forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def is_plain(chunk: nn.Module) -> bool:
    """Return whether a stage's gradients are just added to its parameters."""
    return not isinstance(chunk, DistributedDataParallel) and not any(
        isinstance(m, FSDPModule) for m in chunk.modules()
    )


def sharding_of(chunks: Sequence[nn.Module]) -> Sharding:
    """Return how stages are wrapped, for the validator."""
    sharded = [m for chunk in chunks for m in chunk.modules() if isinstance(m, FSDPModule)]
    return Sharding(
        fsdp=bool(sharded),
        reshard_after_forward=any(reshards_after_forward(module) for module in sharded),
        ddp=any(isinstance(chunk, DistributedDataParallel) for chunk in chunks),
    )
