"""Gradients kept by micro-batch, where adding them up as they come would not give the bits of one process.

One process adds up a tied parameter's gradients of all its uses first, and over micro-batches second; and it takes
micro-batches in their order, which some schedules do not.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn

    from vescale_train.pipe.schedules import Schedule


class UnitGradients:
    """What each micro-batch adds to some parameters, by stage."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[nn.Parameter, ...]] = {}
        self._folded: dict[int, tuple[nn.Parameter, ...]] = {}
        self._units: dict[tuple[int, int], dict[int, torch.Tensor]] = {}

    def watch(self, stage: int, kept: Sequence[nn.Parameter], folded: Sequence[nn.Parameter]) -> None:
        """Keep a stage's gradients of some parameters; those of ``folded`` are added up by ``fold``."""
        ids = {id(parameter) for parameter in kept}
        self._kept[stage] = tuple(kept)
        self._folded[stage] = tuple(parameter for parameter in folded if id(parameter) not in ids)

    def clear(self) -> None:
        """Forget what was kept in the step before."""
        self._units.clear()

    @contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Take what a backward adds to the parameters watched away from them."""
        watched = (*self._kept.get(stage, ()), *self._folded.get(stage, ()))
        before = [parameter.grad for parameter in watched]
        for parameter in watched:
            parameter.grad = None
        yield
        for parameter, gradient in zip(watched, before, strict=True):
            if parameter.grad is not None:
                self._units.setdefault((stage, id(parameter)), {})[microbatch] = parameter.grad
            parameter.grad = gradient

    def fold(self, stage: int) -> None:
        """Add up, in the order of micro-batches, what no other stage has a share in."""
        for parameter in self._folded.get(stage, ()):
            units = self._units.pop((stage, id(parameter)), {})
            for microbatch in sorted(units):
                add_gradient(parameter, units[microbatch])

    def take(self, stage: int, parameter: nn.Parameter) -> dict[int, torch.Tensor]:
        """Return what was kept of a parameter: micro-batch -> gradient."""
        return self._units.pop((stage, id(parameter)), {})


def add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient as a backward would."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def in_order(schedule: Schedule, stage: int) -> bool:
    """Return whether a stage's weight gradients come in the order of micro-batches."""
    rank = schedule.stage_ranks()[stage]
    numbers = [
        leaf.microbatch
        for leaf in schedule.instructions(rank)
        if leaf.stage == stage and leaf.kind in {"B", "W"} and leaf.microbatch is not None
    ]
    return numbers == sorted(numbers)
