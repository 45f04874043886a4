"""The norm of all gradients of a model that is spread over several meshes, and clipping by it.

Every element counts once: what an axis shards is summed over it, what it replicates is not, stages add up, and a
parameter that two stages share counts on one. In exact mode the norm of each whole gradient is taken by itself, and
those are summed in the fixed tree over the order of names, so that the bits do not depend on the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from vescale_train.comm import tree_sum
from vescale_train.ddp.collectives import group_size
from vescale_train.ddp.local import local_of
from vescale_train.errors import ConfigError, InternalError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch's own clip does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientPart:
    """What this rank holds of one gradient."""

    name: str
    local: torch.Tensor | None
    """Scaled in place by a clip; None where this rank holds no element."""
    groups: tuple[dist.ProcessGroup | None, ...]
    """Over each of these the gradient is cut."""
    whole: torch.Tensor | None = None
    """The gradient, plain or as a ``DTensor``, not cut over data-parallel ranks; for exact mode."""


def clip_grad_norm(
    model: nn.Module | Sequence[nn.Module],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    pipeline_group: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[str] = (),
    exact: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their norm together is at most ``max_norm``; return the norm before; on all ranks.

    Args:
        model: one, or the stages of one that are on this rank. Gradients may be plain or ``DTensor``, on any meshes.
        max_norm: infinity only measures.
        norm_type: the power of the norm; infinity takes the largest element. 2 in exact mode.
        pipeline_group: the ranks that hold the other stages.
        counted_elsewhere: names of parameters that another stage holds too, and counts.
        exact: give the same bits on every layout, at the price of gathering each gradient.

    Raises:
        InvalidInputError: a gradient is a sum still to be made.
        ConfigError: an impossible norm.
    """
    parts = gradient_parts(model, exact=exact)
    return clip_parts(
        parts,
        max_norm,
        norm_type=norm_type,
        pipeline_group=pipeline_group,
        counted_elsewhere=counted_elsewhere,
        exact=exact,
    )


def gradient_parts(model: nn.Module | Sequence[nn.Module], *, exact: bool) -> list[GradientPart]:
    """Return what this rank holds of the gradients of a model, tied parameters once."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    found: dict[int, GradientPart] = {}
    for name, parameter in (item for one in models for item in one.named_parameters()):
        gradient = parameter.grad
        if gradient is None or id(parameter) in found:
            continue
        found[id(parameter)] = GradientPart(
            name=name,
            local=local_of(gradient),
            groups=shard_groups(gradient, name),
            whole=gradient if exact else None,
        )
    return list(found.values())


def shard_groups(tensor: torch.Tensor, name: str = "a gradient") -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a tensor is cut, none for a plain one.

    Raises:
        InvalidInputError: it is a sum still to be made.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise InvalidInputError(
            f"cannot take the norm of '{name}': it is a sum still to be made ({tensor.placements}); redistribute it to "
            f"its parameter's placements first"
        )
    cut = [axis for axis, p in enumerate(tensor.placements) if not isinstance(p, Replicate) and mesh.size(axis) > 1]
    return tuple(mesh.get_group(axis) for axis in cut)


def clip_parts(
    parts: Sequence[GradientPart],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    pipeline_group: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[str] = (),
    exact: bool = False,
) -> torch.Tensor:
    """Scale gradients as ``clip_grad_norm`` does."""
    if norm_type <= 0 or max_norm < 0 or (exact and norm_type != 2.0):
        raise ConfigError(f"cannot clip at {max_norm} by a norm of power {norm_type}{' in exact mode' * exact}")
    counted = [part for part in parts if part.name not in counted_elsewhere]
    norm = _exact_norm(counted, pipeline_group) if exact else _norm(counted, norm_type, pipeline_group)
    # not measured only: a norm of 0 and a limit of 0 leave nothing to scale
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    for part in parts:
        if part.local is not None and math.isfinite(max_norm):
            part.local.mul_(factor.to(part.local.device))
    return norm


def _norm(parts: Iterable[GradientPart], norm_type: float, pipeline: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the norm; one collective for each combination of groups over which gradients are cut."""
    is_largest = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
    by_groups: dict[tuple[dist.ProcessGroup | None, ...], list[torch.Tensor]] = {}
    for part in parts:
        powers = by_groups.setdefault(part.groups, [])
        if part.local is not None and part.local.numel():
            norm = torch.linalg.vector_norm(part.local, norm_type, dtype=torch.float32)
            powers.append(norm if is_largest else norm**norm_type)
    total = torch.zeros((), dtype=torch.float32, device=_device_of(parts))
    for groups, powers in by_groups.items():
        mine = torch.stack([total.new_zeros(()), *powers])
        power = mine.max() if is_largest else mine.sum()
        for group in groups:
            dist.all_reduce(power, op, group=group)
        total = torch.maximum(total, power) if is_largest else total + power
    if group_size(pipeline) > 1:
        dist.all_reduce(total, op, group=pipeline)
    return total if is_largest else total ** (1.0 / norm_type)


def _exact_norm(parts: Sequence[GradientPart], pipeline: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the 2-norm from the squares of whole gradients, in the order of their names over all stages."""
    squares = {part.name: _square(part) for part in parts}
    if group_size(pipeline) > 1:
        squares = _of_all_stages(squares, pipeline)
    if not squares:
        return torch.zeros((), dtype=torch.float32)
    return tree_sum([squares[name] for name in sorted(squares)]).sqrt()


def _square(part: GradientPart) -> torch.Tensor:
    whole = part.whole
    if whole is None:
        raise InternalError(f"the exact norm of '{part.name}' needs its whole gradient")
    full: torch.Tensor = (whole.full_tensor() if isinstance(whole, DTensor) else whole).contiguous()
    norm: torch.Tensor = torch.linalg.vector_norm(full, dtype=torch.float32)
    return norm.square()


def _of_all_stages(squares: dict[str, torch.Tensor], pipeline: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Return the squares of all stages by name; a name that two stages hold counts on the first."""
    mine = {name: float(square) for name, square in squares.items()}
    gathered: list[dict[str, float] | None] = [None] * group_size(pipeline)
    dist.all_gather_object(gathered, mine, group=pipeline)
    merged: dict[str, float] = {}
    for found in gathered:
        merged = {**(found or {}), **merged}
    return {name: torch.tensor(square, dtype=torch.float32) for name, square in merged.items()}


def _device_of(parts: Iterable[GradientPart]) -> torch.device:
    return next((part.local.device for part in parts if part.local is not None), torch.device("cpu"))
