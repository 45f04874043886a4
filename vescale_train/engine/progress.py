"""How far a model's training is: carried by the model, counted by ``step``, kept by ``Checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_train.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

_NAME = "_vescale_progress"


class TrainProgress:
    """A number of steps; has ``state_dict``, so that a checkpoint can hold it."""

    def __init__(self) -> None:
        self.step = 0
        """Steps made."""

    def state_dict(self) -> dict[str, Any]:
        """Return the steps made."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a step.

        Raises:
            InvalidInputError: that is no progress.
        """
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise InvalidInputError(f"not the progress of a training: {dict(state)}")
        self.step = step


def progress_of(model: nn.Module) -> TrainProgress:
    """Return a model's progress; the same object every time."""
    found: TrainProgress = model.__dict__.setdefault(_NAME, TrainProgress())
    return found
