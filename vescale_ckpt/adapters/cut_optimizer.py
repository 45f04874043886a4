"""Optimizers that show whole parameters and keep the state of a part of each (ZeRO, one owner a matrix).

Such a state is given and taken as ``ShardedView``. What makes it is not known here, only what it can be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from vescale_ckpt.state.sharded_view import ShardedView


@runtime_checkable
class CutOptimizer(Protocol):
    """What an optimizer of this kind answers, beside what every optimizer has."""

    optimizer: torch.optim.Optimizer
    """The plain one that makes the state."""

    def new_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> ShardedView:
        """Return fresh memory for this rank's part of one value of a parameter's state; it is set once it is filled."""
        ...


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that makes the state: the plain one inside, or itself."""
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else inner
