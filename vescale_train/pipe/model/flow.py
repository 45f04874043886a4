"""The flow of a model: which unit's output is needed where, found by one run without weights.

Every operation is watched: what is made from a unit's output is marked with it, and a unit's inputs carry the marks
of all that went into them. So a skip over several blocks, a mask made from an early output or a second input of a
late block is seen, whatever the model's code does between units.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.model.route import Router
from vescale_train.pipe.model.values import TensorForm, Value, flatten, tensors_in, unflatten
from vescale_train.pipe.torch_fakes import NEEDS_DATA, storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils._pytree import TreeSpec

    from vescale_train.pipe.model.skeleton import Skeleton

Marks = frozenset[Value]


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of one unit: what it needs and what it gives."""

    unit: int
    call: int
    needs: Marks
    placed: bool
    """It has state of its own, so it runs where its unit is; others run wherever they are needed first."""
    free: bool
    """No state and nothing of other units goes into what it gives: every stage runs it for itself."""
    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Of its output: a ``TensorForm`` for each tensor, other leaves as they were."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What flows between the units of a model for inputs of one form."""

    calls: tuple[UnitCall, ...]
    """In the order in which the model makes them."""
    output_needs: Marks

    def find(self, unit: int, call: int) -> UnitCall | None:
        """Return one call, None if the model did not make it."""
        return next((each for each in self.calls if (each.unit, each.call) == (unit, call)), None)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks what operations make with the marks of what went into them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks: dict[int, Marks] = {}
        self._alive: list[torch.Tensor] = []  # a storage's key is only its own while it lives

    def marks(self, tree: Any) -> Marks:
        found: Marks = frozenset()
        for tensor in tensors_in(tree):
            found |= self._marks.get(storage_key(tensor), frozenset())
        return found

    def mark(self, tensor: torch.Tensor, marks: Marks) -> None:
        self._alive.append(tensor)
        key = storage_key(tensor)
        self._marks[key] = self._marks.get(key, frozenset()) | marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        marks = self.marks((args, kwargs))
        if marks:
            written = [args[0]] if func._schema.is_mutable and args else []  # noqa: SLF001 - part of the operator's public form
            for tensor in tensors_in((out, written)):
                self.mark(tensor, marks)
        return out


class _Recorder:
    """Runs every unit, and replaces what it gives by new tensors that carry its own marks only."""

    def __init__(self, skeleton: Skeleton, watch: _Watch, placed: Sequence[bool]) -> None:
        self.skeleton, self.watch, self.placed = skeleton, watch, placed
        self.calls: list[UnitCall] = []
        self._depth = 0

    def call(self, unit: int, run: Callable[[], Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        if self._depth:  # a unit inside a unit is a part of it
            return run()
        needs = self.watch.marks(inputs)
        number = sum(1 for each in self.calls if each.unit == unit)
        self._depth += 1
        try:
            output = run()
        finally:
            self._depth -= 1
        leaves, spec = flatten(output)
        placed = self.placed[unit]
        free = not placed and not self.watch.marks(output)
        forms = tuple(_form(leaf) for leaf in leaves)
        self.calls.append(UnitCall(unit, number, frozenset() if free else needs, placed, free, spec, forms))
        if free:
            return output
        given = [self._given(leaf, Value(unit, number, place)) for place, leaf in enumerate(leaves)]
        return unflatten(given, spec)

    def _given(self, leaf: Any, value: Value) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = self.skeleton.stand_ins.make(leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        self.watch.mark(made, frozenset([value]))
        return made


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorForm(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device)


def measure_flow(
    skeleton: Skeleton, unit_names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool
) -> Flow:
    """Run a model without weights on real inputs, and return what flows between its units.

    Raises:
        SplitError: the code between units asks for data that only another stage has.
    """
    model = skeleton.model.train(training)
    units = [model.get_submodule(name) for name in unit_names]
    watch = _Watch()
    recorder = _Recorder(skeleton, watch, [has_state(unit) for unit in units])
    router = router_of(units)
    router.guide = recorder
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model(*args, **kwargs)
    except NEEDS_DATA as error:
        raise SplitError(
            f"cannot run {type(model).__name__} in stages: its code between units asks for the values of a tensor that "
            f"another stage computes ({error}); keep the modules around that place whole by "
            "smallest_unsplittable_units, or give stages by hand"
        ) from error
    finally:
        router.guide = None
    return Flow(tuple(recorder.calls), watch.marks(output))


def has_state(unit: torch.nn.Module) -> bool:
    """Return whether a unit has anything that is saved and belongs to one stage."""
    return bool(unit.state_dict(keep_vars=True)) or any(True for _ in unit.parameters())


def router_of(units: Sequence[torch.nn.Module]) -> Router:
    """Return the router of these units, made at the first call."""
    route = units[0].__dict__.get("_pipeline_route")
    return route[0] if route is not None else Router(units)


@dataclass(frozen=True, slots=True)
class Routes:
    """The flow between stages: what each stage receives, in the order in which it is sent."""

    flow: Flow
    stage_of_call: dict[tuple[int, int], int]
    """Of every (unit, number of the call) that is not free."""
    received: tuple[tuple[Value, ...], ...]
    """For each stage: what arrives from the stage before, for itself or for later ones."""
    own_calls: tuple[int, ...]
    """For each stage: how many calls of units it makes."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.received)

    def sent(self, stage: int) -> tuple[Value, ...]:
        """Return what a stage sends to the next one."""
        return self.received[stage + 1] if stage + 1 < self.num_stages else ()


def route_between_stages(
    flow: Flow, stage_of_unit: Sequence[int], num_stages: int, unit_names: Sequence[str]
) -> Routes:
    """Return what each stage has to receive.

    Raises:
        SplitError: a stage needs what a later one gives.
    """
    wanted: list[set[Value]] = [set() for _ in range(num_stages)]
    placed = _stages_of_calls(flow, stage_of_unit)
    for call in flow.calls:
        if call.free:
            continue
        stage = placed[call.unit, call.call]
        wanted[stage] |= call.needs
        late = [unit_names[v.unit] for v in call.needs if placed[v.unit, v.call] > stage]
        if late:
            raise SplitError(
                f"cannot run in this order: {unit_names[call.unit]!r} is on stage {stage} and needs the output of "
                f"{late[0]!r} on a later stage; put them in the order in which the model calls them"
            )
    wanted[-1] |= flow.output_needs
    received: list[tuple[Value, ...]] = []
    for stage in range(num_stages):
        needed = set().union(*wanted[stage:])
        received.append(tuple(sorted(value for value in needed if placed[value.unit, value.call] < stage)))
    own = tuple(list(placed.values()).count(stage) for stage in range(num_stages))
    return Routes(flow, placed, tuple(received), own)


def _stages_of_calls(flow: Flow, stage_of_unit: Sequence[int]) -> dict[tuple[int, int], int]:
    """Place each call: where its unit is, or, if that has no state, where the model has come to by then."""
    placed: dict[tuple[int, int], int] = {}
    reached = 0
    for call in flow.calls:
        if not call.free:
            needed = [placed[value.unit, value.call] for value in call.needs]
            stage = stage_of_unit[call.unit] if call.placed else max([reached, *needed])
            placed[call.unit, call.call] = stage
            reached = max(reached, stage)
    return placed
