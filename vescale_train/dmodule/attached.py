"""What a parallelized model carries with it: the mesh, the plan, and how exact it was asked to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_train.errors import StateError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_NAME = "_vescale_attached"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """How a model was parallelized."""

    mesh: DeviceMesh
    """The whole mesh, with all its axes."""
    plan: Any
    exact: bool
    """Whether results are those of one device to the bit."""
    seed: int
    """The seed of the model's random numbers."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        """A copy of a model lies on the same mesh."""
        return self


def attach(model: nn.Module, attached: Attached) -> None:
    """Let the model carry this."""
    model.__dict__[_NAME] = attached


def is_attached(model: nn.Module) -> bool:
    """Return whether the model has been parallelized."""
    return _NAME in model.__dict__


def attached(model: nn.Module) -> Attached:
    """Return how the model was parallelized.

    Raises:
        StateError: if it was not.
    """
    found = model.__dict__.get(_NAME)
    if not isinstance(found, Attached):
        raise StateError(
            f"cannot ask how this {type(model).__name__} was parallelized: it was not; "
            "call vescale_train.parallelize(model, mesh) first, and pass what it returns"
        )
    return found
