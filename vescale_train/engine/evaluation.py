"""Evaluation: the mean loss over batches, without gradients and without dropout, the same number on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vescale_train.engine.batch import LossFn, loss_of, split
from vescale_train.engine.losses import mean_loss, plain
from vescale_train.engine.stages import run_stages
from vescale_train.engine.train_step import Share, share_of
from vescale_train.errors import InternalError, InvalidInputError
from vescale_train.pipe import PipeStage
from vescale_train.timeline import ndtimeit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Any], *, loss_fn: LossFn | None = None, micro_batches: int | None = None
) -> torch.Tensor:
    """Return the mean loss over this rank's batches and those of all others; collective.

    All batches have as many samples, as those of ``data`` do, and every rank has as many batches. The model is put in
    evaluation mode and back, each of its modules to where it was.

    Args:
        model: what ``parallelize`` returned.
        batches: this rank's; see ``step``.
        loss_fn: see ``step``.
        micro_batches: of each batch, over all data-parallel ranks; see ``step``.

    Raises:
        ConfigError: the micro-batches cannot be shared out equally.
        InvalidInputError: there is no batch.
    """
    share = share_of(model, micro_batches)
    of_batch = _of_stages if isinstance(model, PipeStage) else _of_model
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with ndtimeit("evaluate", on_device=True):
            losses = [of_batch(model, batch, loss_fn, share) for batch in batches]
    finally:
        for module, training in modes:
            module.training = training
    if not losses:
        raise InvalidInputError(f"cannot evaluate {type(model).__name__} on no batch")
    by_place = torch.stack(losses).unbind(1)  # the losses of the same micro-batch of all batches
    return mean_loss(by_place, share.group, exact=share.exact).mean()


def _of_model(model: nn.Module, batch: Any, loss_fn: LossFn | None, share: Share) -> torch.Tensor:
    """Return the losses of this rank's micro-batches, float32[own]."""
    return torch.stack([plain(loss_of(model, part, loss_fn)) for part in split(batch, share.own)])


def _of_stages(stage: nn.Module, batch: Any, loss_fn: LossFn | None, _: Share) -> torch.Tensor:
    """Return the loss of a pipeline, which is the mean over all micro-batches already, float32[1]."""
    if not isinstance(stage, PipeStage):
        raise InternalError(f"{type(stage).__name__} is no pipeline stage")
    return run_stages(stage, batch, loss_fn, forward_only=True).reshape(1)
