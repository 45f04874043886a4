"""Batches: any pytree of tensors, cut into micro-batches, and given to a model in the way that its kind tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from vescale_train.errors import ConfigError, InvalidInputError
from vescale_train.torch_private import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from torch import nn

LossFn: TypeAlias = Callable[[Any, Any], torch.Tensor]
"""(what the model returned, the target) -> the mean loss of a micro-batch."""


def num_samples(batch: Any) -> int:
    """Return the samples of a batch: the size of dim 0 of its tensors, which must agree; tensors without dims aside.

    Raises:
        InvalidInputError: no tensor has a dim, or the sizes differ.
    """
    sizes = sorted({leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim})
    if len(sizes) != 1:
        found = f"sizes {sizes}" if sizes else "no tensor with a dim"
        raise InvalidInputError(f"cannot tell the samples of a batch by dim 0 of its tensors: found {found}")
    return int(sizes[0])


def split(batch: Any, num_parts: int) -> list[Any]:
    """Return a batch in equal parts, in order; what is no tensor with a dim goes into each of them whole.

    Raises:
        ConfigError: the parts would not be equal.
        InvalidInputError: the batch's tensors do not say how many samples there are.
    """
    if num_parts == 1:
        return [batch]
    samples = num_samples(batch)
    if samples % num_parts:
        raise ConfigError(
            f"cannot cut {samples} samples of this rank into {num_parts} equal micro-batches: change global_batch, or "
            f"the number of micro_batches"
        )
    leaves, structure = tree_flatten(batch)
    parts = [
        leaf.chunk(num_parts) if isinstance(leaf, torch.Tensor) and leaf.ndim else (leaf,) * num_parts
        for leaf in leaves
    ]
    return [tree_unflatten(list(mine), structure) for mine in zip(*parts, strict=True)]


def inputs_and_target(batch: Any, loss_fn: LossFn | None) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
    """Return a model's positional and named inputs, and the target of the loss.

    A mapping is given by name, and is also the target. A pair is input and target where there is a loss function; else
    a sequence is given by position. Anything else is the only input, and the target.
    """
    if isinstance(batch, Mapping):
        return (), batch, batch
    if isinstance(batch, (tuple, list)):
        if loss_fn is not None and len(batch) == 2:
            return (batch[0],), {}, batch[1]
        return tuple(batch), {}, batch
    return (batch,), {}, batch


def loss_of(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """Return the loss of one micro-batch: what ``loss_fn`` says, or else what the model itself returns as its loss.

    Without ``loss_fn`` the model returns the loss, or an object with ``loss``, a mapping with "loss", or a sequence
    whose first item is the loss, as models of Hugging Face do when they are given labels.

    Raises:
        InvalidInputError: there is no loss, or it is no single number.
    """
    args, named, target = inputs_and_target(batch, loss_fn)
    output = model(*args, **named)
    loss = loss_fn(output, target) if loss_fn is not None else _own_loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InvalidInputError(
            f"the loss of {type(model).__name__} is {shown}, and must be one number: pass loss_fn, a function of the "
            f"model's output and the target"
        )
    return loss


def _own_loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, (tuple, list)):
        return output[0] if output else None
    return getattr(output, "loss", output)
