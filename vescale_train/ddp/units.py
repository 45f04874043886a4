"""Units: the gradients of single micro-batches, which exact mode adds up in one order whoever made them.

A rank makes the units of a contiguous range of the micro-batches of a step, in order: what it can add by itself it adds
as they come, the rest when they are reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_train.comm import TreeSum, canonical_all_reduce, canonical_reduce_scatter, units_of
from vescale_train.ddp.collectives import group_rank, group_size
from vescale_train.errors import StateError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class Units:
    """The units that this rank makes for one flat buffer in one step.

    Args:
        group: the ranks that share the micro-batches of a step.
        num_micro_batches: of all ranks together; None if every rank makes as many, and keeps them until the end.
    """

    def __init__(self, group: dist.ProcessGroup | None, num_micro_batches: int | None) -> None:
        self._group = group
        self._sum: TreeSum | None = None
        self._kept: list[torch.Tensor] = []
        self._num_added = 0
        if num_micro_batches is not None:
            self._begin(num_micro_batches)

    def add(self, unit: torch.Tensor) -> None:
        """Take over the unit of the next micro-batch.

        Raises:
            StateError: this rank has no further micro-batch in this step.
        """
        self._num_added += 1
        if self._sum is None:
            self._kept.append(unit)
            return
        if self._num_added > len(self._own):
            raise StateError(
                f"backward pass {self._num_added} of a step in which this rank has {len(self._own)} of the "
                f"{self._sum.num_units} micro-batches; finish the step, or set num_micro_batches to what it is"
            )
        self._sum.add(self._own[self._num_added - 1], unit)

    def reduce(self, like: torch.Tensor, *, shard: bool) -> torch.Tensor:
        """Return the sum of the units of all ranks, or this rank's equal share of it; all ranks call it.

        Raises:
            StateError: units are missing.
        """
        found = self._sum or self._add_kept()
        if group_size(self._group) == 1:
            return found.total()
        reduce = canonical_reduce_scatter if shard else canonical_all_reduce
        return reduce(found, self._group, like=like)

    def _add_kept(self) -> TreeSum:
        kept, self._kept = self._kept, []
        if not kept:
            raise StateError("no backward pass was made since the gradients were zeroed: there is nothing to sum")
        found = self._begin(len(kept) * group_size(self._group))
        self._num_added = 0
        for unit in kept:
            self.add(unit)
        return found

    def _begin(self, num_micro_batches: int) -> TreeSum:
        self._sum = TreeSum(num_micro_batches)
        self._own = units_of(group_rank(self._group), group_size(self._group), num_micro_batches)
        return self._sum
