"""Routes: every call of a unit passes through here, to be run, recorded, or answered with what was received.

A unit's class is replaced by a subclass of the same name with its own ``__call__``, so the model's code, its names
and ``isinstance`` see no difference, and whatever the unit itself does around its forward (hooks, checkpointing)
happens inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_ROUTE = "_pipeline_route"


class Guide(Protocol):
    """Decides what a call of a unit gives."""

    def call(self, unit: int, run: Callable[[], Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return what the call gives; ``run`` runs the unit itself."""


class Router:
    """The switch that all units of one model share: who decides about calls now, if anybody."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self.guide: Guide | None = None
        for index, unit in enumerate(units):
            _reroute(unit, self, index)

    def route(self, unit: int, run: Callable[[], Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return what a unit's call gives."""
        return run() if self.guide is None else self.guide.call(unit, run, inputs)


def _reroute(unit: nn.Module, router: Router, index: int) -> None:
    cls = type(unit)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken, number = self.__dict__[_ROUTE]
        return taken.route(number, lambda: cls.__call__(self, *args, **kwargs), (args, kwargs))

    body = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    unit.__dict__[_ROUTE] = (router, index)
    unit.__class__ = type(cls.__name__, (cls,), body)
