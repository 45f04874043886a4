"""Which ranks share a loss: those that have other classes of the same tokens, and those that have other tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_ckpt.adapters.tensors import dtensor_layout
from vescale_ckpt.layout.layout import spans
from vescale_train.comm import TreeSum, canonical_all_reduce, gather_uneven, sizes_over
from vescale_train.errors import LayoutError
from vescale_train.loss.tokens import Classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Shares:
    """What a rank has of logits (tokens, classes) and targets, in local memory."""

    logits: torch.Tensor
    target: torch.Tensor
    classes: Classes
    token_groups: tuple[ProcessGroup, ...]


def shares_of_plain(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_group: ProcessGroup | None,
    token_group: ProcessGroup | None,
) -> Shares:
    """Return the shares of plain tensors, whose groups the caller knows; collective where classes are shared."""
    held = logits.shape[class_dim(logits)]
    classes = Classes(held, 0)
    if class_group is not None:
        sizes = sizes_over(held, class_group, logits.device)
        classes = Classes(sum(sizes), sum(sizes[: dist.get_rank(class_group)]), (class_group,))
    return Shares(logits, target, classes, () if token_group is None else (token_group,))


def shares_of_dtensor(logits: DTensor, target: torch.Tensor) -> Shares:
    """Return the shares of DTensor logits; a pending sum is made first.

    Raises:
        LayoutError: the targets fit neither the whole of the logits nor what this rank has of them.
    """
    mesh, dim = logits.device_mesh, class_dim(logits)
    wanted = [p if isinstance(p, Shard) else Replicate() for p in _settled(logits, dim)]
    if tuple(wanted) != tuple(logits.placements):
        logits = logits.redistribute(placements=wanted)
    local = logits.to_local(grad_placements=wanted)
    held = spans(dtensor_layout(logits, "logits"), tuple(logits.shape), tuple(mesh.get_coordinate() or ()))
    offset = held[0].box.offset[dim] if held else 0
    by_class = [axis for axis, p in enumerate(wanted) if isinstance(p, Shard) and p.dim % logits.ndim == dim]
    by_token = [axis for axis, p in enumerate(wanted) if isinstance(p, Shard) and axis not in by_class]
    classes = Classes(logits.shape[dim], offset, tuple(mesh.get_group(axis) for axis in by_class))
    own = _own_target(target, logits, local, target_placements(wanted, dim, logits.ndim))
    return Shares(local, own, classes, tuple(mesh.get_group(axis) for axis in by_token))


def class_dim(logits: torch.Tensor) -> int:
    """Return the dim of the classes: 1, or 0 of a single token's logits."""
    return 1 if logits.ndim > 1 else 0


def target_placements(placements: Sequence[Any], dim: int, ndim: int) -> list[Any]:
    """Return the placements of targets for those of logits: without the dim of the classes."""
    out: list[Any] = []
    for placement in placements:
        cut = placement.dim % ndim if isinstance(placement, Shard) else dim
        out.append(Replicate() if cut == dim else Shard(cut - (cut > dim)))
    return out


class GatherClasses(torch.autograd.Function):
    """``apply(logits, dim, groups, offset)``: the logits of all classes; the gradient of a rank's own goes back."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, dim: int, classes: Classes) -> torch.Tensor:
        """Gather."""
        ctx.own = dim, classes.offset, logits.shape[dim]
        for group in reversed(classes.groups):
            logits = gather_uneven(logits, group, dim)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Take this rank's part."""
        return grad.narrow(*ctx.own), None, None


class SumOver(torch.autograd.Function):
    """``apply(number, groups, exact)``: the sum over ranks of what each has; each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, groups: tuple[ProcessGroup, ...], exact: bool) -> torch.Tensor:  # noqa: ARG004 -- torch's
        """Add up; ``exact``: in the fixed tree over the ranks of each group."""
        total = local.clone()
        for group in reversed(groups):
            if exact:
                units = TreeSum(dist.get_world_size(group))
                units.add(dist.get_rank(group), total)
                total = canonical_all_reduce(units, group)
            else:
                dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004 -- torch's
        """Pass on."""
        return grad, None, None


def _settled(logits: DTensor, dim: int) -> list[Any]:
    """Return the placements, without a cut of the classes that is not one contiguous part."""
    out: list[Any] = []
    for placement in logits.placements:
        cut = getattr(placement, "dim", None)
        scattered = cut is not None and cut % logits.ndim == dim and type(placement) is not Shard
        out.append(Replicate() if scattered else placement)
    return out


def _own_target(target: torch.Tensor, logits: DTensor, local: torch.Tensor, wanted: list[Any]) -> torch.Tensor:
    mesh: DeviceMesh = logits.device_mesh
    dim = class_dim(logits)
    whole, own = (tuple(n for d, n in enumerate(t.shape) if d != dim) for t in (logits, local))
    if not isinstance(target, DTensor):
        if tuple(target.shape) == own:
            return target
        target = DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tuple(target.shape) != whole:
        raise LayoutError(
            f"logits of shape {tuple(logits.shape)} need targets of shape {whole}, or {own} of this rank's own, not "
            f"{tuple(target.shape)}"
        )
    return target.redistribute(placements=wanted).to_local()
