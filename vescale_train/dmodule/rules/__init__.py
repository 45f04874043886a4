"""How torch's functions run on cut tensors, where torch's own rule is missing, wrong or slow: one file a family.

A rule takes the tensor parallel axis and the function's arguments, and returns the result, or ``NotImplemented`` to
leave the call to the general rule of the region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from vescale_train.dmodule.rules.attention import attention
from vescale_train.dmodule.rules.embedding import embedding
from vescale_train.dmodule.rules.linear import addmm, linear
from vescale_train.dmodule.rules.pieces import cat, chunk, method_split, split

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: linear,
    torch.addmm: addmm,
    functional.embedding: embedding,
    functional.scaled_dot_product_attention: attention,
    torch.cat: cat,
    torch.split: split,
    Tensor.split: method_split,
    torch.chunk: chunk,
    Tensor.chunk: chunk,
}

__all__ = ["RULES"]
