"""Stages by trace: torch exports the model as a graph and cuts it; the graph says what flows between stages."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from vescale_train.pipe.batch import as_batch, form_of
from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.fronts import FixedFront
from vescale_train.pipe.model.flow import Flow, Routes, UnitCall, route_between_stages
from vescale_train.pipe.model.units import find_units
from vescale_train.pipe.model.values import Value, flatten, unflatten
from vescale_train.pipe.place import place_of
from vescale_train.pipe.stage import PipeStage, cuts_of, device_of, refuse_wrapped
from vescale_train.pipe.ties import Tie, find_ties
from vescale_train.pipe.tree import place as hang

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._pytree import TreeSpec

    from vescale_train.pipe.plan import PipelineParallelPlan

Source = Value | int | tuple[Any]
"""Where an argument comes from: another stage, the n-th input of the model, or a constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """A model cut by torch's tracer."""

    modules: tuple[nn.Module, ...]
    arguments: tuple[tuple[Source, ...], ...]
    """Of each stage."""
    output: tuple[Source, ...]
    spec: TreeSpec
    """Of the model's output."""


class TracedChunk(nn.Module):
    """A stage that torch has traced."""

    def __init__(self, stage: int, graph: _Graph) -> None:
        super().__init__()
        self.stage, self.module = stage, graph.modules[stage]
        self._arguments, self._output, self._spec = graph.arguments[stage], graph.output, graph.spec

    def forward(
        self, routes: Routes, received: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what is sent to the next stage, and on the last stage the model's output."""
        inputs = flatten((args, kwargs))[0]
        values = dict(zip(routes.received[self.stage], received, strict=True))
        given = self.module(*(_resolve(source, values, inputs) for source in self._arguments))
        for place, leaf in enumerate(given if isinstance(given, (tuple, list)) else (given,)):
            values[Value(self.stage, 0, place)] = leaf
        sent = tuple(values[value] for value in routes.sent(self.stage))
        if self.stage + 1 < routes.num_stages:
            return sent, None
        return sent, unflatten([_resolve(source, values, inputs) for source in self._output], self._spec)


def _resolve(source: Source, values: dict[Value, torch.Tensor], inputs: Sequence[Any]) -> Any:
    if isinstance(source, Value):
        return values[source]
    return inputs[source] if isinstance(source, int) else source[0]


def traced_stage(
    model: nn.Module, plan: PipelineParallelPlan, example: Any, mesh: DeviceMesh | None = None
) -> PipeStage:
    """Trace a model with one micro-batch, cut the graph by a plan, and keep this rank's part.

    A traced model takes micro-batches of the example's form only, and does what it did in the mode (training or not)
    in which it was traced. Cutting by names has neither limit; this is for models whose code between modules must not
    run on every stage.

    Args:
        model: an unchanged module; the same on all ranks.
        plan: with mode ``trace``; cuts are made as for ``fqn``.
        example: one micro-batch, as an engine without a loss function takes minibatches.
        mesh: a mesh with an axis ``pp``, or of one axis; None for one process.

    Raises:
        SplitError: torch cannot trace the model, or cannot cut it there.
    """
    refuse_wrapped(model)
    place = place_of(mesh)
    num_stages = plan.stage_count(place.num_ranks)
    units = find_units(model, plan.smallest_unsplittable_units)
    cuts = cuts_of(model, units, plan, place, num_stages)
    batch = as_batch(example, model, None)
    graph = _trace(model, [units.names[at] for at in cuts[1:-1]], batch.args, batch.kwargs)
    own = [s for s in range(num_stages) if plan.rank_of(s, place.num_ranks) == place.rank]
    tree = nn.Module()
    for stage in own:
        _hang(tree, graph.modules[stage])
    return PipeStage(
        tree,
        [TracedChunk(stage, graph) for stage in own],
        place=place,
        plan=plan,
        front=FixedFront(
            device=device_of(model),
            called=model,
            fixed=_routes(graph),
            form=form_of((batch.args, batch.kwargs)),
        ),
        ties=_ties(model, graph),
    )


def _trace(model: nn.Module, points: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Graph:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        spec = flatten(model(*args, **kwargs))[1]
    try:
        pipe = pipeline(model, args, kwargs, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
    except Exception as error:
        raise SplitError(
            f"cannot trace {type(model).__name__}: {type(error).__name__}: {error}; cut it by names instead"
        ) from error
    if pipe.num_stages != len(points) + 1:
        raise SplitError(f"cannot cut the graph at {points}: torch made {pipe.num_stages} stages of it")
    places: dict[fx.Node, Source] = {}
    modules: list[nn.Module] = []
    arguments: list[tuple[Source, ...]] = []
    inputs = [node for node in pipe.split_gm.graph.nodes if node.op == "placeholder"]
    output: tuple[Source, ...] = ()
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            places[node] = inputs.index(node)
        elif node.op == "call_module":
            places[node] = Value(len(modules), 0, 0)
            modules.append(pipe.get_stage_module(len(modules)))
            arguments.append(tuple(_source(argument, places) for argument in node.args))
        elif node.op == "call_function" and node.target is operator.getitem:
            from_unit = places[node.args[0]]
            places[node] = Value(from_unit[0], 0, node.args[1]) if isinstance(from_unit, Value) else (None,)
        elif node.op == "output":
            output = tuple(_source(argument, places) for argument in flatten(node.args[0])[0])
    return _Graph(modules=tuple(modules), arguments=tuple(arguments), output=output, spec=spec)


def _source(argument: Any, places: dict[fx.Node, Source]) -> Source:
    return places[argument] if isinstance(argument, fx.Node) else (argument,)


def _routes(graph: _Graph) -> Routes:
    calls = []
    for stage, sources in enumerate(graph.arguments):
        needs = frozenset(source for source in sources if isinstance(source, Value))
        calls.append(UnitCall(stage, 0, needs, placed=True, free=False, spec=graph.spec, leaves=()))
    flow = Flow(tuple(calls), frozenset(source for source in graph.output if isinstance(source, Value)))
    numbers = range(len(graph.modules))
    return route_between_stages(flow, numbers, len(numbers), [f"stage {number}" for number in numbers])


def _hang(tree: nn.Module, module: nn.Module) -> None:
    """Hang a traced stage's modules into a tree; their names are those of the model already."""
    for name, parameter in module.named_parameters(recurse=False):
        tree.register_parameter(name, parameter)
    for name, child in module.named_modules():
        if name and (child._parameters or child._buffers):  # noqa: SLF001 - its own, not those below it
            hang(tree, name, child)


def _ties(model: nn.Module, graph: _Graph) -> tuple[Tie, ...]:
    """Return ties over stages: names of one parameter of the model that are held by several stages."""
    held = [{name for name, _ in module.named_parameters(remove_duplicate=False)} for module in graph.modules]
    return find_ties(model, lambda name: [stage for stage, names in enumerate(held) if name in names])
