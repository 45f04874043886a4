"""A minibatch taken apart: what goes to the model, what to the loss, and the micro-batches of both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from vescale_train.pipe.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a model and its loss are given."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    """The second argument of the loss function, if it takes two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch and its weight in the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    start: int
    """Which of the minibatch's samples is its first."""
    count: int
    total: int
    """Samples of the minibatch."""

    @property
    def share(self) -> Fraction:
        """Its share of the samples of the minibatch."""
        return Fraction(self.count, self.total)


def takes_target(loss_fn: Callable[..., Any] | None) -> bool:
    """Return whether a loss function wants a target beside the model's output."""
    if loss_fn is None:
        return False
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, like torch's own losses
        return True
    positional = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    return len([p for p in positional if p.default is p.empty]) > 1


def as_batch(minibatch: Any, model: nn.Module, loss_fn: Callable[..., Any] | None) -> Batch:
    """Return what a minibatch means.

    A ``Batch`` is itself. A mapping is the model's keyword arguments: those that its forward takes; a loss with two
    arguments gets all of it as its target. With such a loss, a pair is (inputs, target), the inputs being a tuple of
    arguments, a mapping, or one value. Without, a tuple or list is the model's arguments and any other value the only
    one.

    Raises:
        BatchError: a loss that takes a target is given none.
    """
    wants_target = takes_target(loss_fn)
    if isinstance(minibatch, Batch):
        return minibatch
    if isinstance(minibatch, Mapping):
        return Batch(kwargs=_accepted(minibatch, model), target=minibatch if wants_target else None)
    if not wants_target:
        args = tuple(minibatch) if isinstance(minibatch, (tuple, list)) else (minibatch,)
        return Batch(args=args)
    if not isinstance(minibatch, (tuple, list)) or len(minibatch) != 2:
        raise BatchError(
            "cannot run this minibatch: the loss function takes an output and a target, so a minibatch is a pair "
            f"(inputs, target), a mapping or a Batch, not {type(minibatch).__name__}"
        )
    inputs, target = minibatch
    if isinstance(inputs, Mapping):
        return Batch(kwargs=dict(inputs), target=target)
    return Batch(args=inputs if isinstance(inputs, tuple) else (inputs,), target=target)


def _accepted(given: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        accepted = dict(given)
    else:
        accepted = {key: value for key, value in given.items() if key in {p.name for p in parameters}}
    if "use_cache" in {p.name for p in parameters} or hasattr(getattr(model, "config", None), "use_cache"):
        accepted.setdefault("use_cache", False)  # a cache of keys and values would stay on the stages that fill it
    return accepted


def split_batch(batch: Batch, num_microbatches: int, whole: Sequence[str] = ()) -> list[MicroBatch]:
    """Cut a batch along its first dimension; sizes differ by one at most.

    The number of samples is the first dimension of the first tensor. Tensors of that size are cut; tensors of other
    sizes, those named by ``whole`` (keyword arguments) and values that are no tensors go to every micro-batch.

    Raises:
        BatchError: there is no tensor, or there are fewer samples than micro-batches.
    """
    parts = {"args": batch.args, "kwargs": batch.kwargs, "target": batch.target}
    paths, spec = pytree.tree_flatten_with_path(parts)
    num_samples = next((leaf.shape[0] for _, leaf in paths if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if num_samples is None:
        raise BatchError("cannot cut a minibatch into micro-batches: it has no tensor with a first dimension")
    if num_samples < num_microbatches:
        raise BatchError(
            f"cannot cut {num_samples} samples into {num_microbatches} micro-batches: each needs one at least; "
            "use a larger batch or fewer micro-batches"
        )
    cut = []
    for path, leaf in paths:
        keys = {key.key for key in path if isinstance(key, pytree.MappingKey)}
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == num_samples and not keys & set(whole):
            cut.append(leaf.tensor_split(num_microbatches))
        else:
            cut.append((leaf,) * num_microbatches)
    least, more = divmod(num_samples, num_microbatches)
    micros = []
    for number in range(num_microbatches):
        tree = pytree.tree_unflatten([pieces[number] for pieces in cut], spec)
        start = number * least + min(number, more)
        micros.append(MicroBatch(**tree, start=start, count=least + (number < more), total=num_samples))
    return micros


def form_of(tree: Any) -> str:
    """Return a text that is equal for inputs of equal form: same tree, shapes and dtypes, same plain values."""
    leaves, spec = pytree.tree_flatten(tree)
    told = [
        f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device.type}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return f"{spec}: {'; '.join(told)}"
