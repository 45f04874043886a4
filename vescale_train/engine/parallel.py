"""Parallelizing a model and making its optimizer: the two lines of a script that know of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from vescale_train import dmodule, optim
from vescale_train.dmodule import Attached, attach, attached
from vescale_train.engine.stages import StagesOptimizer
from vescale_train.errors import ConfigError
from vescale_train.mesh import size
from vescale_train.pipe import PipelineParallelPlan, PipeStage, construct_pipeline_stage
from vescale_train.planner import propose

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.plan import Plan


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Literal["auto"] | Plan | Mapping[str, Any] = "auto",
    *,
    exact: bool = False,
    seed: int = 0,
    allow: Iterable[str] = (),
    pipeline: PipelineParallelPlan | None = None,
) -> nn.Module:
    """Make a model parallel as a plan says, and return it: the same object, of the same class, with the same names.

    On a mesh with pipeline stages, what returns is this rank's ``PipeStage``, which holds the model with the weights of
    its own stages, under the model's names.

    Args:
        model: any ``nn.Module``; it stays unchanged but for its parameters.
        mesh: from ``init``.
        plan: "auto" looks at the model and proposes one (``planner.propose``).
        exact: give the bits of one device on every mesh without pipeline stages.
        seed: of the model's random numbers.
        allow: kinds of problems of the plan that are no errors here.
        pipeline: where the stages are cut, and the schedule; None: twice as many micro-batches as stages, cut evenly.

    Raises:
        PlanError: the plan does not fit the model.
        SplitError: the model cannot be cut into stages like that.
        ConfigError: exact mode was asked for over stages, or a pipeline on a mesh that has none.
        StateError: the model is parallel already.
    """
    num_stages = size(mesh, "pp")
    if pipeline is not None and num_stages == 1:
        raise ConfigError(f"a pipeline was given, and the mesh {mesh} has no axis 'pp' of 2 or more ranks")
    if exact and num_stages > 1:
        raise ConfigError(
            f"exact mode does not reach over {num_stages} pipeline stages: they add up micro-batches one by one and "
            f"not in the fixed tree; use dp, zero and tp with it"
        )
    chosen = propose(model, mesh) if plan == "auto" else plan
    dmodule.apply(model, mesh, chosen, exact=exact, seed=seed, allow=allow)
    if num_stages == 1:
        return model
    pipeline = pipeline or PipelineParallelPlan(num_microbatches=2 * num_stages)
    stage = construct_pipeline_stage(model, pipeline, mesh)
    found = attached(model)
    attach(stage, Attached(mesh=mesh, plan=found.plan, exact=exact, seed=seed))
    return stage


def optimizer(
    model: nn.Module,
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    parameters: Iterable[Any] | None = None,
    zero: int | None = None,
    clip_grad: float = 0.0,
    **options: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer of a parallelized model that sums gradients over the ranks that see different data.

    Args:
        model: what ``parallelize`` returned.
        cls: a plain optimizer's class.
        parameters: parameters or groups; None: all that are trained.
        zero: see ``optim.optimizer``; pipeline stages have 0.
        clip_grad: largest norm of all gradients together, of all stages; 0 does not clip.
        options: of ``cls``, among them ``lr``, and those of ``optim.optimizer``.

    Raises:
        ConfigError: a stage of ZeRO that does not fit.
        StateError: the model was not parallelized.
    """
    attached(model)
    if not isinstance(model, PipeStage):
        return optim.optimizer(model, cls, parameters=parameters, zero=zero, clip_grad=clip_grad, **options)
    if zero not in {None, 0}:
        raise ConfigError(f"cannot use ZeRO-{zero} with pipeline stages: use zero=0, or a mesh without 'pp'")
    make: Any = cls
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return StagesOptimizer(make(trained if parameters is None else parameters, **options), model, clip_grad=clip_grad)
