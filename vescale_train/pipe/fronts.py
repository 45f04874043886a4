"""Front ends: what an engine asks about a model that was cut by names, by tracing, or by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vescale_train.pipe.batch import form_of
from vescale_train.pipe.errors import BatchError
from vescale_train.pipe.model.flow import Flow, Routes, measure_flow, route_between_stages

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vescale_train.pipe.model.skeleton import Skeleton


class Front(Protocol):
    """How a model was cut."""

    @property
    def device(self) -> torch.device:
        """Where tensors between stages lie."""

    @property
    def called(self) -> nn.Module:
        """A module with the forward that a minibatch is for; it need not have weights."""

    def routes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Routes:
        """Return what flows between stages for inputs of this form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFront:
    """Cut by the names of the model's modules: the flow is measured on a copy without weights."""

    skeleton: Skeleton
    called: nn.Module
    unit_names: tuple[str, ...]
    stage_of_unit: tuple[int, ...]
    num_stages: int

    @property
    def device(self) -> torch.device:
        """Where tensors between stages lie."""
        return self.skeleton.device

    def routes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Routes:
        """Return what flows between stages for inputs of this form.

        Raises:
            SplitError: it does not fit the stages.
        """
        flow = measure_flow(self.skeleton, self.unit_names, args, kwargs, training=training)
        return route_between_stages(flow, self.stage_of_unit, self.num_stages, self.unit_names)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedFront:
    """Cut by tracing or by hand: the flow is what it is."""

    device: torch.device
    called: nn.Module
    fixed: Routes
    form: str | None = None
    """Of a traced model: the only form of inputs that it takes."""

    def routes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Routes:  # noqa: ARG002
        """Return what flows between stages.

        Raises:
            BatchError: the model was traced with inputs of another form.
        """
        asked = form_of((args, kwargs))
        if self.form is not None and asked != self.form:
            raise BatchError(
                f"cannot run micro-batches of the form {asked}: the model was traced with {self.form}; "
                "trace it with such inputs, or cut it by names, which takes any"
            )
        return self.fixed


def straight_routes(num_stages: int) -> Routes:
    """Return the routes of stages that each take what the one before gives."""
    return Routes(Flow((), frozenset()), {}, ((),) * num_stages, (1,) * num_stages)
