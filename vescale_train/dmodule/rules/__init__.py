"""How torch's functions run on cut tensors, where torch's own rule is missing, wrong or slow: one file a family.

A rule takes the tensor parallel axis and the function's arguments, and returns the result, or ``NotImplemented`` to
leave the call to the general rule of the region.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from vescale_train.dmodule.layouts import mapped, plain
from vescale_train.dmodule.rules.attention import attention
from vescale_train.dmodule.rules.embedding import embedding
from vescale_train.dmodule.rules.linear import addmm, linear
from vescale_train.dmodule.rules.losses import cross_entropy
from vescale_train.dmodule.rules.pieces import cat, chunk, method_split, split, unbind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

_WHOLE = (
    functional.nll_loss,
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
"""Torch is wrong about these: a loss of cut tokens is a mean of means, a cut kernel is taken for a whole one."""


def whole(function: Callable[..., Any], _mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Run a function on gathered tensors."""
    return function(*mapped(plain, args), **mapped(plain, kwargs))


RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: linear,
    torch.addmm: addmm,
    functional.embedding: embedding,
    functional.scaled_dot_product_attention: attention,
    functional.cross_entropy: cross_entropy,
    torch.cat: cat,
    torch.split: split,
    Tensor.split: method_split,
    torch.chunk: chunk,
    Tensor.chunk: chunk,
    torch.unbind: unbind,
    Tensor.unbind: unbind,
    **{function: partial(whole, function) for function in _WHOLE},
}

__all__ = ["RULES"]
