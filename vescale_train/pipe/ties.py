"""Parameters that several stages hold: found by identity before the model is cut, kept equal by summed gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.pipe.errors import SplitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter under one or more names, on several stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    """All stages that hold it, ascending."""
    name_on: tuple[str, ...]
    """For each of ``stages``: a name under which that stage holds it."""


def find_ties(
    model: nn.Module, stages_of: Callable[[str], Sequence[int]], declared: Iterable[Sequence[str]] = ()
) -> tuple[Tie, ...]:
    """Return the parameters that more than one stage holds.

    Two names are one parameter if they are one object, or different objects over the same memory. Empty and
    ``meta`` tensors have no memory to go by.

    Args:
        model: before it is cut.
        stages_of: the stages that hold a parameter of this name.
        declared: groups of names that the caller wants kept equal.

    Raises:
        SplitError: a declared name is unknown, or a declared group has different shapes.
    """
    found: dict[object, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        found.setdefault(_identity(parameter), []).append(name)
    groups = list(found.values())
    for group in declared:
        _check_declared(group, parameters)
        groups = [names for names in groups if not set(names) & set(group)] + [
            sorted({*group, *(name for names in groups if set(names) & set(group) for name in names)})
        ]
    ties = []
    for names in groups:
        held = {stage: name for name in reversed(names) for stage in stages_of(name)}
        if len(held) > 1:
            stages = tuple(sorted(held))
            ties.append(Tie(tuple(names), stages, tuple(held[stage] for stage in stages)))
    return tuple(ties)


def _identity(parameter: torch.Tensor) -> object:
    if parameter.device.type == "meta" or not parameter.numel() or not parameter.data_ptr():
        return id(parameter)
    return parameter.data_ptr(), parameter.dtype, tuple(parameter.shape), tuple(parameter.stride())


def _check_declared(group: Sequence[str], parameters: dict[str, nn.Parameter]) -> None:
    unknown = [name for name in group if name not in parameters]
    if unknown:
        raise SplitError(f"cannot share {', '.join(map(repr, unknown))}: the model has no such parameters")
    shapes = {name: tuple(parameters[name].shape) for name in group}
    if len(set(shapes.values())) > 1:
        raise SplitError(f"cannot share parameters of different shapes: {shapes}")
