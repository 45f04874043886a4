"""Pipeline stages of this rank: the caller's model with only this rank's weights in it, cut by a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vescale_train.errors import StateError
from vescale_train.pipe.costs import unit_costs
from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.fronts import NamedFront
from vescale_train.pipe.model.flow import has_state, router_of
from vescale_train.pipe.model.part import Part
from vescale_train.pipe.model.skeleton import Skeleton
from vescale_train.pipe.model.units import Units, find_units
from vescale_train.pipe.place import Place, place_of
from vescale_train.pipe.plan import ModeType, PipelineParallelPlan, PipelineSplitMethodType
from vescale_train.pipe.split import cut_at, cut_balanced, cut_by_cost, cut_evenly, stages_of
from vescale_train.pipe.ties import Tie, find_ties

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.pipe.fronts import Front
    from vescale_train.pipe.model.flow import Routes


class Chunk(nn.Module):
    """One stage as a module of its own: the units that it runs. This is what to wrap by ``fully_shard`` or DDP.

    Its forward runs the whole model's forward with this stage's share in it.
    """

    def __init__(self, part: Part, units: dict[str, nn.Module], glue: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.stage = part.stage
        self._part = part
        self._glue = tuple(glue)
        for name, unit in units.items():
            self.add_module(name.replace(".", "/"), unit)

    def forward(
        self, routes: Routes, received: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what is sent to the next stage, and on the last stage the model's output."""
        done = self._part.run(routes, received, args, kwargs)
        return done.sent, done.output

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Give the parameters of the units, and those that the model's own code uses between units."""
        seen: set[int] = set()
        for parameter in (*super().parameters(recurse), *self._glue):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


class PipeStage(nn.Module):
    """What one pipeline rank holds: the model, with the weights of this rank's stages, under the model's own names.

    It is saved and loaded as the model: names are global, so any other cut of the model loads what this one saves.
    """

    checkpoint_wraps = "module"
    """For ``vescale_ckpt``: save and load what this attribute holds."""

    def __init__(
        self,
        module: nn.Module,
        chunks: Sequence[nn.Module],
        *,
        place: Place,
        plan: PipelineParallelPlan,
        front: Front,
        ties: tuple[Tie, ...],
        unit_names: Sequence[str] = (),
        stage_of_unit: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.place, self.plan, self.ties, self.front = place, plan, ties, front
        self.unit_names, self.stage_of_unit = tuple(unit_names), tuple(stage_of_unit)
        self._chunks: list[nn.Module] = list(chunks)

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        """This rank's stages, ascending; each a ``Chunk``, or what ``wrap`` has made of it."""
        return tuple(self._chunks)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.plan.stage_count(self.place.num_ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """The numbers of this rank's stages, ascending."""
        return tuple(s for s in range(self.num_stages) if self.plan.rank_of(s, self.place.num_ranks) == self.place.rank)

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        """Replace each stage of this rank by what ``wrapper`` makes of it, torch's DDP for instance."""
        self._chunks = [wrapper(chunk) for chunk in self._chunks]

    def units(self) -> dict[str, nn.Module]:
        """Return the units whose weights this rank holds, by name."""
        own = set(self.stages)
        return {
            name: self.module.get_submodule(name)
            for name, stage in zip(self.unit_names, self.stage_of_unit, strict=True)
            if stage in own
        }

    def counted_names(self) -> tuple[str, ...]:
        """Return the parameters that this rank counts in sums over all stages: tied ones are counted by one only."""
        left_out = {id(self.module.get_parameter(name)) for tie in self.ties for name in self._elsewhere(tie)}
        return tuple(name for name, parameter in self.named_parameters() if id(parameter) not in left_out)

    def _elsewhere(self, tie: Tie) -> Iterator[str]:
        if self.plan.rank_of(tie.stages[0], self.place.num_ranks) != self.place.rank:
            yield from (n for s, n in zip(tie.stages, tie.name_on, strict=True) if s in self.stages)

    def forward(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse: a stage is run by a ``PipeEngine``.

        Raises:
            StateError: always.
        """
        raise StateError("cannot call a pipeline stage: give it to a PipeEngine and call that")

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Give this rank's parameters under the names that they have in the whole model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Give this rank's buffers under the names that they have in the whole model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's share of the whole model's state, under its names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load this rank's share; names are those of the whole model."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)


def construct_pipeline_stage(
    model: nn.Module, plan: PipelineParallelPlan, mesh: DeviceMesh | None = None, *, device: torch.device | None = None
) -> PipeStage:
    """Cut a model by a plan and keep this rank's part; collective over the pipeline's ranks only in what follows.

    The model is changed in place: weights of other ranks' stages are freed, its classes, names and code stay. It may
    lie on the ``meta`` device. Wrap the stage's ``chunks`` afterwards, not the model before.

    Args:
        model: an unchanged module; the same on all ranks.
        plan: the same on all ranks.
        mesh: a mesh with an axis ``pp``, or of one axis; None for one process.
        device: where its inputs will lie; None asks the parameters.

    Raises:
        SplitError: the model cannot be cut like that.
        ConfigError: the plan does not fit the mesh.
    """
    if plan.mode != ModeType.FQN:
        raise SplitError(
            f"cannot build stages by mode {plan.mode.value!r} from a whole model; see manual_stage, traced_stage"
        )
    refuse_wrapped(model)
    place = place_of(mesh)
    num_stages = plan.stage_count(place.num_ranks)
    units = find_units(model, plan.smallest_unsplittable_units)
    stage_of_unit = stages_of(cuts_of(model, units, plan, place, num_stages))
    skeleton = Skeleton(model, device or device_of(model))
    own = [s for s in range(num_stages) if plan.rank_of(s, place.num_ranks) == place.rank]
    ties = find_ties(model, lambda name: _holders(name, units, stage_of_unit, num_stages), plan.shared_modules)
    modules = {name: model.get_submodule(name) for name in units.names}
    router = router_of(list(modules.values()))
    glue = [model.get_parameter(name) for name in units.glue]
    chunks = [
        Chunk(
            Part(stage=stage, model=model, router=router, stand_ins=skeleton.stand_ins, unit_names=units.names),
            {name: modules[name] for name, s in zip(units.names, stage_of_unit, strict=True) if s == stage},
            glue,
        )
        for stage in own
    ]
    _free(modules, {n for n, s in zip(units.names, stage_of_unit, strict=True) if s in own})
    return PipeStage(
        model,
        chunks,
        place=place,
        plan=plan,
        front=NamedFront(
            skeleton=skeleton,
            called=model,
            unit_names=units.names,
            stage_of_unit=tuple(stage_of_unit),
            num_stages=num_stages,
        ),
        ties=ties,
        unit_names=units.names,
        stage_of_unit=stage_of_unit,
    )


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that something has been wrapped around already."""
    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, DistributedDataParallel)):
            raise SplitError(
                f"cannot cut {type(model).__name__}: {name or 'it'} is wrapped already ({type(module).__name__}); "
                "build the stage first and wrap its chunks"
            )


def device_of(model: nn.Module) -> torch.device:
    """Return where a model lies; the CPU if it lies nowhere yet."""
    found = next((p.device for p in model.parameters() if p.device.type != "meta"), None)
    return found or torch.device("cpu")


def cuts_of(
    model: nn.Module, units: Units, plan: PipelineParallelPlan, place: Place, num_stages: int
) -> tuple[int, ...]:
    """Return where a plan cuts a model: the first unit of each stage, and the number of units."""
    match plan.split_method:
        case PipelineSplitMethodType.MANUAL:
            return cut_at(units.names, plan.split_points, num_stages)
        case PipelineSplitMethodType.UNIFORM:
            return cut_evenly(len(units.names), units.blocks, num_stages)
        case PipelineSplitMethodType.PARAMETERS:
            return cut_by_cost(unit_costs(model, units.names, "parameters"), num_stages)
        case PipelineSplitMethodType.FLOPS:
            return cut_by_cost(unit_costs(model, units.names, "flops"), num_stages)
        case PipelineSplitMethodType.AUTO:
            costs = plan.costs or unit_costs(model, units.names, "flops")
            if len(costs) != len(units.names):
                raise SplitError(
                    f"cannot split by {len(costs)} costs: there are {len(units.names)} units, {units.names}"
                )
            return cut_balanced(costs, num_stages, lambda stage: plan.rank_of(stage, place.num_ranks))


def _holders(name: str, units: Units, stage_of_unit: Sequence[int], num_stages: int) -> list[int]:
    """Return the stages that hold a parameter; one that no unit owns is held by all."""
    inside = [s for unit, s in zip(units.names, stage_of_unit, strict=True) if name.startswith(f"{unit}.")]
    return inside or list(range(num_stages))


def _free(units: dict[str, nn.Module], own: set[str]) -> None:
    """Take the weights and saved buffers out of the units that other ranks run; a module that is shared stays."""
    kept = {id(module) for name in own for module in units[name].modules()}
    for name, unit in units.items():
        if name in own or not has_state(unit):
            continue
        for module in unit.modules():
            if id(module) not in kept:
                for held in (module._parameters, module._buffers):  # noqa: SLF001 - emptied, names kept
                    for key in held:
                        held[key] = None
