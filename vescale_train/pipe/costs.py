"""What units cost, estimated from their weights: enough to place cuts before anything has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


def unit_costs(model: nn.Module, names: Sequence[str], by: Literal["parameters", "flops"]) -> list[float]:
    """Return the cost of each unit: its parameters, or its floating-point operations for one token or pixel.

    Operations are counted as those of the matrix products of its weights, twice their elements; a lookup in an
    embedding costs nothing and other small things count as their parameters do.
    """
    units = [model.get_submodule(name) for name in names]
    if by == "parameters":
        return [float(sum(parameter.numel() for parameter in unit.parameters())) for unit in units]
    return [float(sum(_operations(module) for module in unit.modules())) for unit in units]


def _operations(module: nn.Module) -> int:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 0
    return sum((2 if weight.ndim > 1 else 1) * weight.numel() for weight in module.parameters(recurse=False))
