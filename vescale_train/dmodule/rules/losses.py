"""Cross entropy of cut logits: over the parts of the vocabulary or of the tokens that ranks hold, as one number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.nn import functional

from vescale_train.dmodule.layouts import plain, sharded_dim
from vescale_train.loss import cross_entropy as shared_cross_entropy
from vescale_train.plan.placement import is_interleaved

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def cross_entropy(  # noqa: PLR0917 - the signature of torch's function
    _mesh: DeviceMesh,
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Torch's own takes a mean of the ranks' means where some tokens are ignored; this one does not."""
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    weight = None if weight is None else plain(weight)
    target = plain(target)
    old = size_average is not None or reduce is not None
    if old or target.is_floating_point() or not isinstance(input, DTensor) or not _is_plainly_cut(input):
        return functional.cross_entropy(plain(input), target, weight, size_average, reduce=reduce, **options)
    return shared_cross_entropy(input, target, weight, **options)


def _is_plainly_cut(logits: DTensor) -> bool:
    return sharded_dim(logits) is not None and not is_interleaved(logits.placements[0])
