"""The errors of the training package, beside those of the packages below that it passes on."""

from __future__ import annotations

from vescale_ckpt.errors import (
    ConfigError,
    InternalError,
    InvalidInputError,
    LayoutError,
    RankFailureError,
    StateError,
    VeScaleError,
)

__all__ = [
    "ConfigError",
    "InternalError",
    "InvalidInputError",
    "LayoutError",
    "PlanError",
    "RankFailureError",
    "SilentFaultError",
    "StateError",
    "VeScaleError",
]


class PlanError(InvalidInputError):
    """A plan does not fit the model or the mesh; ``problems`` lists all of it, one line each."""

    kind = "plan"

    @property
    def problems(self) -> tuple[str, ...]:
        """Every fault found, one line each."""
        return tuple(self.context.get("problems", ()))


class SilentFaultError(VeScaleError, RuntimeError):
    """torch would compute something else than one device does, without an error; ``context["fault"]`` says which."""

    kind = "silent_fault"
