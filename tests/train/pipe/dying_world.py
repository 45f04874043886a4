"""A rank that dies in the middle of a step, and one whose model raises: what the others are told."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import torch.distributed as dist

from tests.train.pipe.models import MODELS
from vescale_train.errors import RankFailureError
from vescale_train.pipe import (
    PipeEngine,
    PipelineParallelPlan,
    construct_pipeline_stage,
    register_instruction,
)

SCHEDULE = "0F0..1,0B0,0B1\n1F0,1FAIL,1F1,1B0,1B1\n2F0..1,2B0,2B1\n3F0,3B0,3F1,3B1\n"


def step(folder: str, how: str) -> None:
    """Run a step in which rank 1 fails, and write down what this rank was told."""
    register_instruction("FAIL", functools.partial(fail, how))
    model, loss_fn, minibatch = MODELS["tied"]()
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    plan = PipelineParallelPlan(num_microbatches=2, schedule_type=SCHEDULE)
    engine = PipeEngine(construct_pipeline_stage(model, plan, mesh), mesh, loss_fn)
    try:
        engine(minibatch)
    except (RankFailureError, ZeroDivisionError) as error:
        (Path(folder) / f"told-{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        os._exit(3)


def fail(how: str, instruction, context) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("a fault of the model")
