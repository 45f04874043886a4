"""Cross entropy of each token where classes are shared out over ranks: its value, and its gradient written out.

A rank sees ``logits[:, offset : offset + n]``. Four numbers a token cross between the ranks: the greatest logit, the
sum of exponentials, the logit of the target, and with label smoothing the sum of weighted logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Classes:
    """Which classes a rank has, and with whom it shares them out."""

    total: int
    offset: int
    groups: tuple[ProcessGroup, ...] = ()

    def sum(self, local: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks that share the classes."""
        return self._reduce(local, dist.ReduceOp.SUM)

    def max(self, local: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the ranks that share the classes."""
        return self._reduce(local, dist.ReduceOp.MAX)

    def _reduce(self, local: torch.Tensor, op: Any) -> torch.Tensor:
        for group in self.groups:
            dist.all_reduce(local, op, group=group)
        return local


def token_weights(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return what each token counts for: the weight of its class, 0 where it is ignored; float32 or that of weights."""
    counted = target != ignore_index
    if weight is None:
        return counted.to(torch.float32)
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0.0)


class TokenLosses(torch.autograd.Function):
    """``apply(logits (tokens, classes here), target (tokens), weight or None, ignore_index, smoothing, classes)``.

    Returns the loss of each token, not divided by anything, in float32 at least; 0 for ignored ones.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 -- torch calls it so
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        smoothing: float,
        classes: Classes,
    ) -> torch.Tensor:
        """Compute the loss."""
        x = logits.to(_wide(logits.dtype))
        low = x.new_full((len(x), 1), -torch.inf)
        greatest = classes.max(torch.cat([x, low], dim=1).amax(dim=1))
        total = classes.sum((x - greatest[:, None]).exp_().sum(dim=1))
        log_total = greatest + total.log_()
        at, here = _position(target, ignore_index, classes.offset, x.shape[1])
        chosen = classes.sum(x.gather(1, at).squeeze(1) * here if x.shape[1] else torch.zeros_like(greatest))
        counts = token_weights(target, weight, ignore_index).to(x.dtype)
        losses = (log_total - chosen) * counts
        if smoothing:
            weights = _own_weights(weight, classes, x)
            whole = weight.sum().to(x.dtype) if weight is not None else float(classes.total)
            smooth = log_total * whole - classes.sum((x * weights).sum(dim=1))
            losses = (1 - smoothing) * losses + smoothing / classes.total * smooth * (target != ignore_index)
        ctx.save_for_backward(logits, log_total, target, counts, weight)
        ctx.options = ignore_index, smoothing, classes
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradient of this rank's logits."""
        logits, log_total, target, counts, weight = ctx.saved_tensors
        ignore_index, smoothing, classes = ctx.options
        x = logits.to(_wide(logits.dtype))
        chosen = spread = grad * counts * (1 - smoothing)
        smooth = grad * (target != ignore_index) * (smoothing / classes.total)
        if smoothing:
            whole = weight.sum().to(x.dtype) if weight is not None else float(classes.total)
            spread = chosen + smooth * whole
        out = (x - log_total[:, None]).exp_().mul_(spread[:, None])
        if smoothing:
            out -= smooth[:, None] * _own_weights(weight, classes, x)
        if x.shape[1]:
            at, here = _position(target, ignore_index, classes.offset, x.shape[1])
            out.scatter_add_(1, at, -(chosen * here)[:, None])
        return out.to(logits.dtype), None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _position(target: torch.Tensor, ignore_index: int, offset: int, held: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a token's class stands among those held (tokens, 1), and whether it does (tokens)."""
    at = target - offset
    here = (target != ignore_index) & (at >= 0) & (at < held)
    return at.clamp(0, max(held - 1, 0))[:, None], here


def _own_weights(weight: torch.Tensor | None, classes: Classes, x: torch.Tensor) -> torch.Tensor:
    if weight is None:
        return x.new_ones(x.shape[1])
    return weight[classes.offset : classes.offset + x.shape[1]].to(x.dtype)
