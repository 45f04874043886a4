"""One step of training, on any mesh: micro-batches, forward and backward, reduction, clipping, the optimizer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from vescale_train.ddp import DistributedDataParallel
from vescale_train.dmodule import attached
from vescale_train.engine.batch import LossFn, loss_of, split
from vescale_train.engine.losses import mean_loss, plain
from vescale_train.engine.progress import progress_of
from vescale_train.engine.random_numbers import micro_batch_numbers, random_numbers
from vescale_train.engine.stages import run_stages
from vescale_train.errors import ConfigError
from vescale_train.mesh import batch_group
from vescale_train.optim import clip_grad_norm
from vescale_train.pipe import PipeStage
from vescale_train.timeline import Kind, inc_step, ndtimeit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """This rank's part of the micro-batches of a step."""

    total: int
    """Micro-batches of all data-parallel ranks."""
    own: int
    group: DeviceMesh | None
    exact: bool

    def place(self, number: int) -> tuple[int, int]:
        """Return which of the step's micro-batches the ``number``-th of this rank is, and how many there are."""
        rank = 0 if self.group is None else self.group.get_local_rank()
        return rank * self.own + number, self.total


def step(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    micro_batches: int | None = None,
    clip_grad: float | None = None,
    scheduler: LRScheduler | None = None,
) -> torch.Tensor:
    """Make one step and return its loss: the mean over all micro-batches of all ranks, on every rank; collective.

    The step is that of one device which accumulates the gradients of ``micro_batches`` equal parts of the global batch
    and divides by their number, so the loss function returns the mean over its samples.

    Args:
        model: what ``parallelize`` returned.
        optim: what ``optimizer`` returned, or any optimizer of the model.
        batch: this rank's samples, from ``data``: any pytree of tensors whose dim 0 counts samples.
        loss_fn: of the model's output and the target; see ``batch.loss_of`` for what happens without.
        micro_batches: of the whole step, over all data-parallel ranks; None: one a rank. In exact mode it is part of
            what is computed, so it must be given, and is the same on every mesh. A pipeline's plan has its own number.
        clip_grad: largest norm of all gradients together; None: as the optimizer was made.
        scheduler: stepped after the optimizer.

    Raises:
        ConfigError: the micro-batches cannot be shared out equally.
        InvalidInputError: the batch or the loss is not what it must be.
        StateError: the model was not parallelized.
    """
    share = share_of(model, micro_batches)
    if isinstance(model, PipeStage):
        optim.zero_grad()
        with ndtimeit("pipeline", kind=Kind.OTHER, on_device=True):
            loss = run_stages(model, batch, loss_fn)
    else:
        loss = _gradients(model, optim, batch, loss_fn, share)
    with ndtimeit("optimizer", on_device=True):
        _update(model, optim, clip_grad, exact=share.exact)
    if scheduler is not None:
        scheduler.step()
    progress_of(model).step += 1
    inc_step()
    return loss


def _gradients(
    model: nn.Module, optim: torch.optim.Optimizer, batch: Any, loss_fn: LossFn | None, share: Share
) -> torch.Tensor:
    """Make the reduced gradients of a step and return its loss."""
    wrappers = _wrappers_of(model, optim)
    parts = split(batch, share.own)
    optim.zero_grad()
    losses = []
    with random_numbers(model) as rng:
        for number, part in enumerate(parts):
            with micro_batch_numbers(rng, part, share.place(number)):
                is_last = number + 1 == share.own
                losses.append(_forward_backward(model, part, loss_fn, wrappers, share, is_last=is_last))
    with ndtimeit("reduce gradients", link="gradients", on_device=True):
        for wrapper in wrappers:
            wrapper.finish_grad_sync()
    with ndtimeit("reduce loss", link="loss", on_device=True):
        return mean_loss(losses, share.group, exact=share.exact)


def share_of(model: nn.Module, micro_batches: int | None) -> Share:
    """Return this rank's part of a number of micro-batches.

    Raises:
        ConfigError: they cannot be shared out equally, or exact mode needs to be told.
    """
    found = attached(model)
    group = batch_group(found.mesh)
    num_ranks = 1 if group is None else group.size()
    if isinstance(model, PipeStage):
        planned = model.plan.num_microbatches * num_ranks
        if micro_batches not in {None, planned}:
            raise ConfigError(
                f"cannot make a step of micro_batches={micro_batches}: the pipeline's plan has "
                f"{model.plan.num_microbatches} on each of {num_ranks} data-parallel ranks, which is {planned}"
            )
        micro_batches = planned
    if micro_batches is None:
        if found.exact and num_ranks > 1:
            raise ConfigError(
                f"exact mode on {num_ranks} data-parallel ranks needs micro_batches: their number is part of what is "
                f"computed, and must not follow from the mesh"
            )
        micro_batches = num_ranks
    if micro_batches < 1 or micro_batches % num_ranks:
        raise ConfigError(
            f"cannot share micro_batches={micro_batches} among {num_ranks} data-parallel ranks: it counts those of the "
            f"whole step, so choose a multiple of {num_ranks}"
        )
    return Share(total=micro_batches, own=micro_batches // num_ranks, group=group, exact=found.exact)


def _forward_backward(
    model: nn.Module,
    part: Any,
    loss_fn: LossFn | None,
    wrappers: Sequence[DistributedDataParallel],
    share: Share,
    *,
    is_last: bool,
) -> torch.Tensor:
    with ndtimeit("forward", on_device=True):
        loss = loss_of(model, part, loss_fn)
    with ndtimeit("backward", on_device=True), _syncing(model, wrappers, is_last=is_last):
        _scaled(loss, wrappers, share).backward()  # type: ignore[no-untyped-call]
    return plain(loss)


def _scaled(loss: torch.Tensor, wrappers: Sequence[DistributedDataParallel], share: Share) -> torch.Tensor:
    """Return the loss divided by what the gradients are not divided by later."""
    kinds = {wrapper.mean_over for wrapper in wrappers}
    if kinds == {"passes"}:
        return loss
    return loss / (share.total if kinds == {"nothing"} else share.own)


def _syncing(
    model: nn.Module, wrappers: Sequence[DistributedDataParallel], *, is_last: bool
) -> AbstractContextManager[Any]:
    """Return a context in which gradients are only added up, unless it is the last backward pass of the step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    stack = contextlib.ExitStack()
    if not is_last:
        for wrapper in wrappers:
            stack.enter_context(wrapper.no_sync())
    return stack


def _wrappers_of(model: nn.Module, optim: torch.optim.Optimizer) -> list[DistributedDataParallel]:
    """Return what sums the gradients of this model over ranks.

    Raises:
        ConfigError: several ranks see different data, and nothing sums their gradients.
    """
    models = getattr(optim, "models", ())
    wrappers = [wrapper for wrapper in models if isinstance(wrapper, DistributedDataParallel)]
    group = batch_group(attached(model).mesh)
    if not wrappers and group is not None and group.size() > 1 and not isinstance(model, FSDPModule):
        raise ConfigError(
            f"{group.size()} ranks see different data, and this {type(optim).__name__} does not sum their gradients: "
            f"make it by vescale_train.optimizer(model, {type(optim).__name__}, ...)"
        )
    return wrappers


def _update(model: nn.Module, optim: torch.optim.Optimizer, clip_grad: float | None, *, exact: bool) -> None:
    if clip_grad is not None and hasattr(optim, "clip_grad"):
        optim.clip_grad = clip_grad
    elif clip_grad:
        clip_grad_norm(model, clip_grad, exact=exact)
    optim.step()
