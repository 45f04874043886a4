"""What a plan can name: a model's modules and parameters as plain data, ties included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

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

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        """Return the names of a model."""
        first: dict[int, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        tied: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shapes[name] = tuple(parameter.shape)
            tied[name] = first.setdefault(id(parameter), name)
        modules = tuple(name for name, _ in model.named_modules(remove_duplicate=False))
        return cls(modules=modules, shapes=shapes, tied=tied)

    def edges(self) -> tuple[str, ...]:
        """Return every name that a key of the forward part can match."""
        at_modules = (f"{name}.{edge}" if name else edge for name in self.modules for edge in EDGES)
        return (*at_modules, *self.shapes)
