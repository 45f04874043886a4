"""A plain optimizer on top of data parallelism: it waits for the gradients, clips them, and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vescale_train.ddp import DistributedDataParallel
from vescale_train.errors import ConfigError
from vescale_train.optim.norm import clip_grad_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist


class BasicOptimizer(torch.optim.Optimizer):
    """Steps a plain optimizer on whole gradients; every rank updates all parameters that it holds.

    Groups and state are those of the plain optimizer, the very same objects.

    Args:
        optimizer: for the parameters of the models.
        models: wrapped with data parallelism, or any others, whose gradients are ready when ``step`` is called
            (``fully_shard`` makes them so).
        clip_grad: largest norm of all gradients together; 0 does not clip.
        exact: take that norm in exact mode; by default where a model is in it.
        pipeline_group: the ranks that hold the other stages of the same model, for the norm.

    Raises:
        ConfigError: a model keeps a share of the gradients only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: nn.Module | Sequence[nn.Module],
        *,
        clip_grad: float = 0.0,
        exact: bool | None = None,
        pipeline_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.models = (models,) if isinstance(models, nn.Module) else tuple(models)
        wrapped = [model for model in self.models if isinstance(model, DistributedDataParallel)]
        if any(model.is_sharded for model in wrapped):
            raise ConfigError("a model made with use_distributed_optimizer=True needs a DistributedOptimizer")
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self.optimizer = optimizer
        """The plain one."""
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.clip_grad = clip_grad
        self.grad_norm: torch.Tensor | None = None
        """Norm of all gradients of the last step, before clipping; None unless ``clip_grad``."""
        self._wrapped = wrapped
        self._exact = any(model.options.exact for model in wrapped) if exact is None else exact
        self._pipeline_group = pipeline_group

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce gradients that are not reduced yet, clip and update; on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for model in self._wrapped:
            model.finish_grad_sync()
        if self.clip_grad > 0:
            self.grad_norm = clip_grad_norm(
                [model.module if isinstance(model, DistributedDataParallel) else model for model in self.models],
                self.clip_grad,
                pipeline_group=self._pipeline_group,
                exact=self._exact,
            )
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, in the buffers too."""
        for model in self._wrapped:
            model.zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the plain optimizer."""
        if hasattr(self, "optimizer"):
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the plain optimizer's state."""
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
