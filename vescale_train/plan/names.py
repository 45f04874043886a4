"""What a plan can name: a model's modules and parameters as plain data, ties included."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

EDGES = ("input", "output")


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """A model as a plan sees it; needs no tensor, so plans are tested without models."""

    modules: tuple[str, ...]
    """Every module's fully qualified name; ``""`` is the model itself."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every name of every parameter -> its global shape. A tied parameter is here under each of its names."""
    tied: Mapping[str, str]
    """Name of a parameter -> the first name of the same parameter; itself where it is not tied."""

    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module -> the arguments of its forward; without the modules whose forward takes any."""
    inputs_dims: Mapping[str, int] = field(default_factory=dict)
    """Matrix of a linear layer or an embedding -> the dim that what it maps from lies along."""

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        """Return the names of a model."""
        first: dict[int, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        tied: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shapes[name] = tuple(parameter.shape)
            tied[name] = first.setdefault(id(parameter), name)
        modules = dict(model.named_modules(remove_duplicate=False))
        takes = {name: arguments for name, module in modules.items() if (arguments := _arguments(module)) is not None}
        dims = {
            f"{name}.weight" if name else "weight": dim
            for name, module in modules.items()
            if (dim := _inputs_dim(module)) is not None
        }
        return cls(modules=tuple(modules), shapes=shapes, tied=tied, takes=takes, inputs_dims=dims)

    def edges(self) -> tuple[str, ...]:
        """Return every name that a key of the forward part can match."""
        at_modules = (f"{name}.{edge}" if name else edge for name in self.modules for edge in EDGES)
        return (*at_modules, *self.shapes)


def _arguments(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names that a module's forward takes, or None if it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD} for one in parameters):
        return None
    return tuple(one.name for one in parameters)


def _inputs_dim(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return 1
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # Hugging Face's, [inputs, outputs]
    return 0 if is_conv1d or isinstance(module, nn.Embedding) else None
