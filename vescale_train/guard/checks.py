"""The checks, one a fault: each looks at a call before torch makes it, and reports, or gives other arguments.

A check is called with (name, args, kwargs) and returns the arguments to go on with, or ``Answer`` with the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from vescale_train.guard.layouts import describe, dtensors, is_pending, sharded_dims, shares_memory
from vescale_train.guard.settings import current, report
from vescale_train.torch_private import dtensor_handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call that need not be made any more."""

    value: Any


Check: TypeAlias = "Callable[[str, tuple[Any, ...], dict[str, Any]], Arguments | Answer]"

_COPY = "_vescale_is_copy_of_a_view"


def check_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """S1: every rank draws the same numbers for its own part, unless ``single_device_rng`` is on."""
    if torch.ops.aten.normal_.default in dtensor_handlers() or not _draws(name, args, kwargs):
        return args, kwargs
    for tensor in dtensors(args, kwargs):
        if sharded_dims(tensor):
            report(
                "S1",
                f"{name} draws the same numbers on every rank for {describe(tensor)}, where one device draws different "
                f"ones: switch on vescale_train.rng.single_device_rng(seed)",
            )
            break
    return args, kwargs


def check_write(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """S2: a write to what is a copy here and a view on one device is lost."""
    target = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(target, DTensor):
        if getattr(target, _COPY, False):
            report(
                "S2",
                f"{name} writes to a copy: the slice of a sharded dim was gathered, and the write does not reach the "
                f"tensor it was taken from; write to the whole with torch.where or to its to_local()",
            )
        elif name == "__setitem__" and _cuts(args[1], target):
            report(
                "S2",
                f"the assignment to part of a sharded dim of {describe(target)} is lost: write with torch.where, or to "
                f"to_local()",
            )
    return args, kwargs


def mark_copies(base: Any, result: Any) -> None:
    """S2: remember which results of a view operation are copies."""
    if isinstance(base, DTensor) and (sharded_dims(base) or getattr(base, _COPY, False)):
        for view in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(view, DTensor) and (getattr(base, _COPY, False) or not shares_memory(base, view)):
                setattr(view, _COPY, True)


def check_scalar(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | Answer:
    """S3 and S12: a scalar read of a pending sum is this rank's part of it."""
    tensor = args[0] if args else None
    if not isinstance(tensor, DTensor) or not is_pending(tensor):
        return args, kwargs
    if current().mode == "raise" and current().scalar_reads == "reduce":
        return Answer(getattr(tensor.full_tensor(), name)(*args[1:], **kwargs))
    report(
        "S3" if name == "item" else "S12",
        f"{name} of {describe(tensor)} reads this rank's part of the result: take full_tensor() first, on all ranks, "
        f"or guard(scalar_reads='reduce')",
    )
    return args, kwargs


def check_sum(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """S11: a number added to a pending sum may be added on every rank; the sum is made first."""
    pending = [x for x in args if isinstance(x, DTensor) and is_pending(x)]
    if not pending or all(isinstance(x, DTensor) for x in args[:2]) or "S11" in current().exempt:
        return args, kwargs
    if current().mode == "warn":
        report("S11", f"{name} may add a number once for each rank to {describe(pending[0])}: take full_tensor() first")
        return args, kwargs
    return tuple(_settled(x) for x in args), kwargs


def check_loss(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """S10: the mean of the means of ranks is not the mean where tokens count differently."""
    logits, target, weight, ignore_index, reduction = _loss_arguments(args, kwargs)
    if not isinstance(logits, DTensor) or reduction != "mean":
        return args, kwargs
    if sharded_dims(logits) - {1 if logits.ndim > 1 else 0} and (weight is not None or _has(target, ignore_index)):
        what = "class weights" if weight is not None else "ignored tokens"
        report(
            "S10",
            f"{name} with {what} and {describe(logits)} is the mean of every rank's mean: call vescale_train.loss."
            f"cross_entropy, or run the model in vescale_train.loss.parallel_loss()",
        )
    return args, kwargs


def check_log_softmax(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """S13: in torch's ``loss_parallel`` a log_softmax by itself has wrong gradients."""
    if torch.ops.aten._log_softmax.default not in dtensor_handlers():  # noqa: SLF001 -- the operation's name
        return args, kwargs
    for tensor in dtensors(args, kwargs):
        if sharded_dims(tensor):
            report(
                "S13",
                f"{name} of {describe(tensor)} inside of torch's loss_parallel() has wrong gradients unless a "
                f"cross entropy follows: use vescale_train.loss.parallel_loss()",
            )
            break
    return args, kwargs


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of this name and arguments draws anything."""
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if "dropout" in name:
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return bool(probability) and training is not False
    if name == "multi_head_attention_forward":
        return bool(kwargs.get("dropout_p", args[10] if len(args) > 10 else 0)) and kwargs.get("training", True)
    if name == "rrelu":
        return bool(args[3] if len(args) > 3 else kwargs.get("training", False))
    return True


def _cuts(index: Any, tensor: DTensor) -> bool:
    """Return whether a basic index takes part of a sharded dim; False for an index made of tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, (torch.Tensor, list)) or part is True or part is False for part in parts):
        return False
    named = sum(part is not None and part is not Ellipsis for part in parts)
    dims, dim = sharded_dims(tensor), 0
    for part in parts:
        if part is Ellipsis:
            dim += tensor.ndim - named
        elif part is not None:
            size = tensor.shape[dim]
            is_whole = isinstance(part, slice) and range(*part.indices(size)) == range(size)
            if dim in dims and not is_whole:
                return True
            dim += 1
    return False


def _settled(value: Any) -> Any:
    if not isinstance(value, DTensor) or not is_pending(value):
        return value
    wanted = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
    return value.redistribute(placements=wanted)


def _loss_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return logits, target, weight, ignore_index and reduction of a call of torch's cross_entropy or nll_loss."""
    names: Iterable[str] = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    found = dict(zip(names, args, strict=False)) | kwargs
    return (
        found.get("input"),
        found.get("target"),
        found.get("weight"),
        found.get("ignore_index", -100),
        found.get("reduction", "mean"),
    )


def _has(target: Any, ignore_index: int) -> bool:
    """Return whether any rank has an ignored token; collective for a sharded target."""
    if not isinstance(target, torch.Tensor) or target.dtype.is_floating_point:
        return False
    ignored = target == ignore_index
    found = ignored.sum()
    return bool((found.full_tensor() if isinstance(found, DTensor) else found).item())
