"""Cross entropy that is one number, however logits are laid out: a mean over all tokens, never a mean of means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from vescale_train.errors import ConfigError, InvalidInputError
from vescale_train.loss.shares import (
    GatherClasses,
    Shares,
    SumOver,
    class_dim,
    shares_of_dtensor,
    shares_of_plain,
    target_placements,
)
from vescale_train.loss.tokens import TokenLosses, token_weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def cross_entropy(  # noqa: PLR0913 -- torch's options, and who shares
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_group: ProcessGroup | None = None,
    token_group: ProcessGroup | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Return what ``torch.nn.functional.cross_entropy`` returns for the whole tensors on one device.

    Gradients are those of the returned number: added up over ranks that have other tokens they are the gradient of one
    device. (A wrapper that averages gradients over ranks divides them once too often: the loss is the mean already.)

    Args:
        logits: (N, C), (N, C, ...) or (C); a DTensor in any layout, or a plain tensor that is this rank's part.
        target: Class indexes: (N), (N, ...) or (); a DTensor, or plain, whole or this rank's part.
        weight: Of each class (C), whole on every rank.
        ignore_index: Tokens of this target count for nothing.
        reduction: "mean" over the weights of all tokens of all ranks, "sum", or "none".
        label_smoothing: In [0, 1].
        class_group: Of plain logits: the ranks that share the classes out, in order.
        token_group: Of plain logits: the ranks that have other tokens.
        exact: Gather the classes and add up over ranks in a fixed tree, so that bits are those of one device that has
            the same tokens in as many equal parts.

    Raises:
        InvalidInputError: the target is no class index (probabilities are not taken), or an option is impossible.
        LayoutError: logits and targets do not fit.
    """
    _check(target, reduction, label_smoothing)
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    if isinstance(logits, DTensor):
        if class_group is not None or token_group is not None:
            raise ConfigError(
                "the layout of DTensor logits says who shares them: leave class_group and token_group out"
            )
        shares = shares_of_dtensor(logits, target)
    else:
        whole = target.full_tensor() if isinstance(target, DTensor) else target
        shares = shares_of_plain(logits, whole, class_group, token_group)
    compute = _exact_losses if exact else _losses
    losses = compute(shares, weight, ignore_index, label_smoothing)
    if reduction == "none":
        return _laid_out_losses(losses, logits) if isinstance(logits, DTensor) else losses.to(logits.dtype)
    result = _reduced(losses, shares, weight, ignore_index, mean=reduction == "mean", exact=exact).to(logits.dtype)
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        return DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return result


def _losses(shares: Shares, weight: torch.Tensor | None, ignore_index: int, smoothing: float) -> torch.Tensor:
    """Return the loss of each of this rank's tokens, in the shape of its targets."""
    dim = class_dim(shares.logits)
    rows = shares.logits.movedim(dim, -1)
    flat = rows.reshape(shares.target.numel(), rows.shape[-1])
    losses: torch.Tensor = TokenLosses.apply(  # type: ignore[no-untyped-call]
        flat, shares.target.reshape(-1), weight, ignore_index, smoothing, shares.classes
    )
    return losses.view(shares.target.shape)


def _exact_losses(shares: Shares, weight: torch.Tensor | None, ignore_index: int, smoothing: float) -> torch.Tensor:
    """Return the same from the logits of all classes, by torch's own function."""
    logits = GatherClasses.apply(shares.logits, class_dim(shares.logits), shares.classes)  # type: ignore[no-untyped-call]
    return functional.cross_entropy(
        logits, shares.target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
    )


def _reduced(
    losses: torch.Tensor, shares: Shares, weight: torch.Tensor | None, ignore_index: int, *, mean: bool, exact: bool
) -> torch.Tensor:
    wide = torch.float64 if losses.dtype == torch.float64 else torch.float32
    total = _sum_over(losses.to(wide).sum(), shares, exact=exact)
    if not mean:
        return total
    counts = token_weights(shares.target, weight, ignore_index).to(wide).sum()
    return total / _sum_over(counts, shares, exact=exact)


def _sum_over(local: torch.Tensor, shares: Shares, *, exact: bool) -> torch.Tensor:
    total: torch.Tensor = SumOver.apply(local, shares.token_groups, exact)  # type: ignore[no-untyped-call]
    return total


def _laid_out_losses(losses: torch.Tensor, logits: DTensor) -> torch.Tensor:
    dim = class_dim(logits)
    shape = torch.Size(n for d, n in enumerate(logits.shape) if d != dim)
    return DTensor.from_local(
        losses.to(logits.dtype),
        logits.device_mesh,
        target_placements(logits.placements, dim, logits.ndim),
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _check(target: torch.Tensor, reduction: str, smoothing: float) -> None:
    if target.dtype.is_floating_point:
        raise InvalidInputError(f"cross_entropy takes class indexes as targets, not probabilities ({target.dtype})")
    if reduction not in {"mean", "sum", "none"}:
        raise InvalidInputError(f"the reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0 <= smoothing <= 1:
        raise InvalidInputError(f"label_smoothing is in [0, 1], not {smoothing}")
