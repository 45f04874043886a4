"""Stages by hand: the caller's modules, one a stage, each called with what the one before returns."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.fronts import FixedFront, straight_routes
from vescale_train.pipe.place import Place, place_of
from vescale_train.pipe.stage import PipeStage, device_of
from vescale_train.pipe.ties import Tie
from vescale_train.pipe.tree import global_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.pipe.model.flow import Routes
    from vescale_train.pipe.plan import PipelineParallelPlan


class ManualChunk(nn.Module):
    """A stage by hand."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        super().__init__()
        self.stage, self.module = stage, module

    def forward(
        self, routes: Routes, received: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what is sent to the next stage, and on the last stage the model's output."""
        if self.stage:
            named = list(inspect.signature(self.module.forward).parameters)[len(received) :]
            output = self.module(*received, **{key: value for key, value in kwargs.items() if key in named})
        else:
            output = self.module(*args, **kwargs)
        if self.stage + 1 == routes.num_stages:
            return (), output
        sent = output if isinstance(output, (tuple, list)) else (output,)
        if not all(isinstance(tensor, torch.Tensor) for tensor in sent):
            raise SplitError(
                f"cannot send what stage {self.stage} returns ({type(output).__name__}): a stage by hand returns a "
                "tensor or a tuple of tensors; cut by names to send other trees"
            )
        return tuple(sent), None


class _Anything(nn.Module):
    """Stands for the whole model, which no rank has."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Take any inputs."""


def manual_stage(
    modules: Mapping[int, nn.Module],
    plan: PipelineParallelPlan,
    mesh: DeviceMesh | None = None,
    *,
    names: Mapping[int, Mapping[str, str]] | None = None,
) -> PipeStage:
    """Return this rank's stages from modules of the caller's; collective over the pipeline's ranks.

    The first stage is called with the minibatch's inputs, every other with what the one before returns (a tensor, or a
    tuple of tensors), and with those named inputs of the minibatch that its forward names.

    Args:
        modules: stage -> module, for the stages that the plan puts on this rank.
        plan: with mode ``manual``; its ``shared_modules`` are groups of global parameter names to be kept equal.
        mesh: a mesh with an axis ``pp``, or of one axis; None for one process.
        names: stage -> {name of a module inside it: its name in the whole model}. Without, the names inside a stage
            are taken for global ones.

    Raises:
        SplitError: other stages were given than lie here, or two stages use one name for different weights.
    """
    place = place_of(mesh)
    num_stages = plan.stage_count(place.num_ranks)
    own = [s for s in range(num_stages) if plan.rank_of(s, place.num_ranks) == place.rank]
    if sorted(modules) != own:
        raise SplitError(f"cannot build stages by hand: {sorted(modules)} were given, but {own} lie on this rank")
    tree = nn.Module()
    held: dict[str, int] = {}
    for stage in own:
        named = (names or {}).get(stage) or {child: child for child, _ in modules[stage].named_children()}
        global_tree(tree, modules[stage], named, stage)
        held |= {name: stage for name, _ in _parameters(modules[stage], named)}
    device = next((device_of(module) for module in modules.values()), torch.device("cpu"))
    return PipeStage(
        tree,
        [ManualChunk(stage, modules[stage]) for stage in own],
        place=place,
        plan=plan,
        front=FixedFront(device=device, called=_Anything(), fixed=straight_routes(num_stages)),
        ties=_ties(place, plan, held),
    )


def _parameters(module: nn.Module, named: Mapping[str, str]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{whole}.{name}", parameter)
        for local, whole in named.items()
        for name, parameter in module.get_submodule(local).named_parameters(remove_duplicate=False)
    ]


def _ties(place: Place, plan: PipelineParallelPlan, held: dict[str, int]) -> tuple[Tie, ...]:
    """Ask all ranks which names they hold; a name on two stages is an error, a declared group a tie."""
    everyone: list[dict[str, int]] = [held] * place.num_ranks
    if place.group is not None and place.num_ranks > 1:
        dist.all_gather_object(everyone, held, group=place.group)
    stages: dict[str, int] = {}
    for each in everyone:
        for name, stage in each.items():
            if stages.setdefault(name, stage) != stage:
                raise SplitError(
                    f"cannot build stages by hand: stages {stages[name]} and {stage} both call a parameter {name!r}; "
                    "names inside a stage are not those of the model: give names={stage: {inside: global}}"
                )
    ties = []
    for group in plan.shared_modules:
        unknown = [name for name in group if name not in stages]
        if unknown:
            raise SplitError(f"cannot share {', '.join(map(repr, unknown))}: no stage has such parameters")
        at = {stages[name]: name for name in reversed(group)}
        ties.append(Tie(tuple(group), tuple(sorted(at)), tuple(at[stage] for stage in sorted(at))))
    return tuple(ties)
