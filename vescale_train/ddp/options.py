"""Options of data parallelism that are seldom set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vescale_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DDPOptions:
    """What is seldom set."""

    exact: bool = False
    """Sum the gradients of all micro-batches of a step in one fixed order, whatever the number of ranks. Each backward
    pass is a micro-batch; of those of a step a rank makes a contiguous range, in order. Nothing overlaps then."""
    mean_over: Literal["ranks", "passes", "nothing"] | None = None
    """What the sum is divided by: the number of ranks (for losses that are divided by the number of passes already, as
    for torch's DDP), the number of backward passes of all ranks, or 1. By default ranks, in exact mode passes."""
    shard_gradients: bool = False
    """With a distributed optimizer, keep only this rank's share of a reduced bucket (ZeRO-2)."""
    find_unused: bool = True
    """Tell parameters that no rank used from others, by one small collective a step; else their gradient is 0."""
    check_parameters: bool = True
    """Refuse parameters that differ between ranks at the start."""

    def check(self, *, is_sharded: bool) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: they do.
        """
        if self.shard_gradients and not is_sharded:
            raise ConfigError("shard_gradients needs use_distributed_optimizer=True: others want whole ones")
        if self.exact and self.mean_over == "ranks":
            raise ConfigError(
                "exact mode cannot take the mean over ranks: losses would have to be divided by the passes of a rank, "
                "which depend on the number of ranks; use mean_over='passes' and do not divide the losses"
            )
