"""Training a model in pipeline stages: the same lines of a script, where a mesh has an axis ``pp``.

Gradients are summed over the data-parallel ranks after the pipeline is done, tensor by tensor in flat buffers: with
schedules that split backward, gradients come without autograd's hooks, and what hangs on these would never be reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_train.dmodule import attached
from vescale_train.errors import ConfigError
from vescale_train.mesh import axis, batch_group
from vescale_train.optim import BasicOptimizer, clip_grad_norm
from vescale_train.pipe import PipeEngine, PipeStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.engine.batch import LossFn

_NAME = "_vescale_pipe_engines"


class StagesOptimizer(BasicOptimizer):
    """Steps a plain optimizer on the stages of this rank: sums over data-parallel ranks, clips over all stages.

    Args:
        optimizer: of the stage's parameters.
        stage: this rank's.
        clip_grad: largest norm of the gradients of all stages together; 0 does not clip.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stage: PipeStage, *, clip_grad: float = 0.0) -> None:
        mesh = attached(stage).mesh
        pipeline = axis(mesh, "pp")
        super().__init__(
            optimizer,
            stage,
            clip_grad=clip_grad,
            exact=False,
            pipeline_group=None if pipeline is None else pipeline.get_group(),
        )
        self._stage = stage
        self._data_group = batch_group(mesh)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Sum gradients over the data-parallel ranks, clip and update; on all ranks.

        Raises:
            ConfigError: there is a closure, which a pipeline cannot run again.
        """
        if closure is not None:
            raise ConfigError("cannot run a closure on pipeline stages: call the engine, and then step()")
        if self._data_group is not None:
            average_gradients(self._stage.parameters(), self._data_group)
        if self.clip_grad > 0:
            names = {name for name, _ in self._stage.named_parameters()}
            self.grad_norm = clip_grad_norm(
                self._stage,
                self.clip_grad,
                pipeline_group=self._pipeline_group,
                counted_elsewhere=names - set(self._stage.counted_names()),
            )
        self.optimizer.step()
        return None


def run_stages(stage: PipeStage, batch: Any, loss_fn: LossFn | None, *, forward_only: bool = False) -> torch.Tensor:
    """Run this rank's batch through the pipeline and return the loss: the mean over all data-parallel ranks.

    Raises:
        ConfigError: there is no loss.
    """
    engines: dict[Any, PipeEngine] = stage.__dict__.setdefault(_NAME, {})
    if loss_fn not in engines:
        engines[loss_fn] = PipeEngine(stage, loss_fn=loss_fn)
    loss, _ = engines[loss_fn](batch, forward_only=forward_only)
    if loss is None:
        raise ConfigError("the last stage gave no loss: pass loss_fn, or give the model its labels")
    loss = loss.detach().reshape(()).float().clone()
    group = batch_group(attached(stage).mesh)
    if group is not None and group.size() > 1:
        dist.all_reduce(loss, group=group.get_group())
        loss /= group.size()
    return loss


def average_gradients(parameters: Iterable[torch.Tensor], group: DeviceMesh) -> None:
    """Make every gradient the mean over a group's ranks, by one collective a dtype; a missing one counts as 0.

    Every rank has the same parameters. A parameter that has no gradient anywhere gets zeros.
    """
    if group.size() == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            by_kind.setdefault((local.dtype, local.device), []).append(local)
    for gradients in by_kind.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group.get_group())
        flat /= group.size()
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
