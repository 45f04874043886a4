"""A part of a model run by itself: the model's own forward, in which units of other stages give what was received."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vescale_train.errors import StateError
from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.model.values import TensorForm, Value, flatten, tensors_in, unflatten
from vescale_train.pipe.torch_fakes import is_stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from vescale_train.pipe.model.flow import Routes, UnitCall
    from vescale_train.pipe.model.route import Router
    from vescale_train.pipe.torch_fakes import StandIns


class _DoneError(Exception):
    """Leaves the model's forward once a stage has nothing more to do; hooks that must always run still do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRun:
    """What a stage's part of one forward gave."""

    sent: tuple[torch.Tensor, ...]
    """In the order of ``Routes.sent``."""
    output: Any
    """The model's output on the last stage, None on others."""


class _PartGuide:
    """Runs this stage's units; gives what was received, or stand-ins, for all others."""

    def __init__(
        self, stage: int, routes: Routes, received: dict[Value, torch.Tensor], stand_ins: StandIns, names: Sequence[str]
    ) -> None:
        self.stage, self.routes, self.stand_ins, self.names = stage, routes, stand_ins, names
        self.values = received
        self._count: Counter[int] = Counter()
        self._left = routes.own_calls[stage]
        self._inside = False

    def call(self, unit: int, run: Callable[[], Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        if self._inside:
            return run()
        number = self._count[unit]
        self._count[unit] += 1
        known = self.routes.flow.find(unit, number)
        if known is None:
            raise SplitError(
                f"cannot run stage {self.stage}: {self.names[unit]!r} was called a {number + 1}. time, which it was "
                "not when the flow of the model was measured; a model whose calls depend on data needs manual stages"
            )
        mine = self.routes.stage_of_call.get((unit, number)) == self.stage
        if mine or known.free:
            return self._run(known, run, inputs)
        if not self._left and self.stage + 1 < self.routes.num_stages:
            raise _DoneError
        return self._stand_in(known)

    def _run(self, known: UnitCall, run: Callable[[], Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        if not known.free and any(is_stand_in(tensor) for tensor in tensors_in(inputs)):
            raise SplitError(
                f"cannot run stage {self.stage}: {self.names[known.unit]!r} needs what another stage computes and did "
                "not need it when the flow of the model was measured"
            )
        self._inside = True
        try:
            output = run()
        finally:
            self._inside = False
        if not known.free:
            self._left -= 1
            for place, leaf in enumerate(flatten(output)[0]):
                if isinstance(leaf, torch.Tensor):
                    self.values[Value(known.unit, known.call, place)] = leaf
        return output

    def _stand_in(self, known: UnitCall) -> Any:
        leaves = []
        for place, form in enumerate(known.leaves):
            leaf = form
            if isinstance(form, TensorForm):
                leaf = self.values.get(Value(known.unit, known.call, place))
                if leaf is None:
                    leaf = self.stand_ins.make(form.shape, form.stride, form.dtype, form.device)
            leaves.append(leaf)
        return unflatten(leaves, known.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One stage of a model that lies, perhaps with other stages, in this process."""

    stage: int
    model: nn.Module
    router: Router
    stand_ins: StandIns
    unit_names: tuple[str, ...]

    def run(
        self, routes: Routes, received: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PartRun:
        """Run this stage's share of the model's forward.

        Args:
            routes: what flows between stages for inputs of this form.
            received: from the stage before, in the order of ``routes.received``.
            args: the model's own inputs, the same on every stage.
            kwargs: likewise.

        Raises:
            StateError: the model is being run already.
            SplitError: the model does something else than when its flow was measured.
        """
        if self.router.guide is not None:
            raise StateError("cannot run a pipeline stage inside another run of the same model")
        values = dict(zip(routes.received[self.stage], received, strict=True))
        guide = _PartGuide(self.stage, routes, values, self.stand_ins, self.unit_names)
        self.router.guide = guide
        output = None
        try:
            output = self.model(*args, **kwargs)
        except _DoneError:
            pass
        finally:
            self.router.guide = None
        last = self.stage + 1 == routes.num_stages
        return PartRun(
            sent=tuple(guide.values[value] for value in routes.sent(self.stage)), output=output if last else None
        )
