"""The training engine and the pipeline runtime that stand on the checkpoint store.

Names are looked up when they are asked for: a script that only wants the mesh imports no more than that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vescale_train.data import data

if TYPE_CHECKING:
    from vescale_train.ddp import DDPOptions, DistributedDataParallel
    from vescale_train.dmodule import DModule, attached, is_dmodule, parallelize_module
    from vescale_train.engine import Checkpoint, evaluate, optimizer, parallelize, step
    from vescale_train.engine.deferred import deferred_init, materialize
    from vescale_train.loss import cross_entropy, parallel_loss
    from vescale_train.mesh import VESCALE_DEVICE_MESH, init, init_distributed
    from vescale_train.metrics import Meter, Progress
    from vescale_train.optim import (
        BasicOptimizer,
        DistributedOptimizer,
        MuonByOwner,
        clip_grad_norm,
        fully_shard_policy,
        recompute_activations,
    )
    from vescale_train.pipe import (
        ModeType,
        PipeEngine,
        PipelineParallelPlan,
        PipelineScheduleType,
        PipelineSplitMethodType,
        construct_pipeline_stage,
        register_instruction,
        validate_pipeline_schedule,
    )
    from vescale_train.plan import Interleaved, Plan
    from vescale_train.planner import auto_parallelize_module, explain, propose, search
    from vescale_train.ragged import RaggedShard
    from vescale_train.rng import single_device_rng
    from vescale_train.timeline import flush, init_ndtimers, ndtimeit, wait

__all__ = [
    "VESCALE_DEVICE_MESH",
    "BasicOptimizer",
    "Checkpoint",
    "DDPOptions",
    "DModule",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Interleaved",
    "Meter",
    "ModeType",
    "MuonByOwner",
    "PipeEngine",
    "PipelineParallelPlan",
    "PipelineScheduleType",
    "PipelineSplitMethodType",
    "Plan",
    "Progress",
    "RaggedShard",
    "attached",
    "auto_parallelize_module",
    "clip_grad_norm",
    "construct_pipeline_stage",
    "cross_entropy",
    "data",
    "deferred_init",
    "evaluate",
    "explain",
    "flush",
    "fully_shard_policy",
    "init",
    "init_distributed",
    "init_ndtimers",
    "is_dmodule",
    "materialize",
    "ndtimeit",
    "optimizer",
    "parallel_loss",
    "parallelize",
    "parallelize_module",
    "propose",
    "recompute_activations",
    "register_instruction",
    "search",
    "single_device_rng",
    "step",
    "validate_pipeline_schedule",
    "wait",
]

_ROOMS = {
    "ddp": (
        "DDPOptions",
        "DistributedDataParallel",
    ),
    "dmodule": (
        "DModule",
        "attached",
        "is_dmodule",
        "parallelize_module",
    ),
    "engine": (
        "Checkpoint",
        "evaluate",
        "optimizer",
        "parallelize",
        "step",
    ),
    "engine.deferred": (
        "deferred_init",
        "materialize",
    ),
    "loss": (
        "cross_entropy",
        "parallel_loss",
    ),
    "mesh": (
        "VESCALE_DEVICE_MESH",
        "init",
        "init_distributed",
    ),
    "metrics": (
        "Meter",
        "Progress",
    ),
    "optim": (
        "BasicOptimizer",
        "DistributedOptimizer",
        "MuonByOwner",
        "clip_grad_norm",
        "fully_shard_policy",
        "recompute_activations",
    ),
    "pipe": (
        "ModeType",
        "PipeEngine",
        "PipelineParallelPlan",
        "PipelineScheduleType",
        "PipelineSplitMethodType",
        "construct_pipeline_stage",
        "register_instruction",
        "validate_pipeline_schedule",
    ),
    "plan": (
        "Interleaved",
        "Plan",
    ),
    "planner": (
        "auto_parallelize_module",
        "explain",
        "propose",
        "search",
    ),
    "ragged": ("RaggedShard",),
    "rng": ("single_device_rng",),
    "timeline": (
        "flush",
        "init_ndtimers",
        "ndtimeit",
        "wait",
    ),
}
"""Room -> its names that are offered here; ``data`` is both a room and a function, and only the function shows."""

_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return a public name from its room."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    """Return all public names, those not looked up yet too."""
    return sorted({*globals(), *__all__})
