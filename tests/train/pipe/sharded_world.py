"""Stages that are data parallel, fully sharded or tensor parallel inside: right, or refused before the first step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.train.pipe.models import MODELS
from tests.train.pipe.world import reference, refused
from vescale_train.pipe import PipeEngine, PipelineParallelPlan, ScheduleError, construct_pipeline_stage

SPLIT = ("zero_bubble", "zbv", "dualpipe_v")
REFUSED = {(kind, name): "the backward is split" for kind in SPLIT for name in ("ddp", "fsdp")} | {
    ("interleaved_1f1b", "ddp"): "several stages lie on a rank"
}
KINDS = {"1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2, "zbv": 2, "dualpipe_v": 2}


def check_data_parallel() -> dict[str, str]:
    """Run every schedule with every wrapping of its stages on 2 x 2 ranks; return what was right and what refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    done = {}
    wrappings = {
        "ddp": lambda chunk: DistributedDataParallel(chunk, process_group=mesh["dp"].get_group(), bucket_cap_mb=100),
        "fsdp": lambda chunk: sharded(chunk, mesh, reshard=True),
        "fsdp kept": lambda chunk: sharded(chunk, mesh, reshard=False),
    }
    for kind, chunks in KINDS.items():
        for name, wrap in wrappings.items():
            try:
                done[f"{kind} {name}"] = one_pair(kind, chunks, name, wrap, mesh)
            except Exception as error:
                raise AssertionError(f"{kind} {name}, rank {dist.get_rank()}") from error
    return done


def sharded(chunk, mesh, *, reshard):
    return fully_shard(chunk, mesh=mesh["dp"], reshard_after_forward=reshard)


def one_pair(kind, chunks, name, wrap, mesh) -> str:
    model, loss_fn, (x, y) = MODELS["chain"]()
    halves = [(x[:8], y[:8]), (x[8:], y[8:])]
    models = [reference(model, loss_fn, half, 4)[2] for half in halves]
    plan = PipelineParallelPlan(num_microbatches=4, schedule_type=kind, virtual_chunks=chunks)
    stage = construct_pipeline_stage(model, plan, mesh)
    stage.wrap(wrap)
    reason = REFUSED.get((kind, name))
    if reason is not None:
        refused(ScheduleError, reason, PipeEngine, stage, mesh, loss_fn)
        return "refused"
    engine = PipeEngine(stage, mesh, loss_fn)
    for _ in range(2):
        stage.zero_grad()
        engine(halves[mesh.get_local_rank("dp")])
    wanted = [dict(each.named_parameters()) for each in models]
    count = 0
    for parameter_name, parameter in stage.named_parameters():
        mean = (wanted[0][parameter_name].grad + wanted[1][parameter_name].grad) / 2
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, mean, msg=parameter_name)
        count += 1
    assert count >= 8
    return "right"


class ShardedOutput(PrepareModuleOutput):
    """Cuts what a block gives along time, and leaves it a DTensor."""

    def __init__(self):
        super().__init__(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False)


class WholeInput(PrepareModuleInput):
    """Takes a DTensor that is cut along time, and gives the block all of it."""

    def __init__(self):
        super().__init__(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)


def check_tensor_parallel() -> int:
    """Activations that are sharded between stages arrive as they were."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    count = 0
    for kind, chunks in KINDS.items():
        model, loss_fn, minibatch = MODELS["frozen front"]()
        _, _, ref = reference(model, loss_fn, minibatch, 4)
        plan = PipelineParallelPlan(num_microbatches=4, schedule_type=kind, virtual_chunks=chunks)
        stage = construct_pipeline_stage(model, plan, mesh)
        for name, unit in stage.units().items():
            if name.startswith("blocks."):
                tensor_parallel(unit, mesh["tp"], is_first=name == "blocks.0")
            elif name == "head":
                parallelize_module(unit, mesh["tp"], WholeInput())
        PipeEngine(stage, mesh, loss_fn)(minibatch)
        wanted = dict(ref.named_parameters())
        for name, parameter in stage.named_parameters():
            if wanted[name].grad is not None:
                got = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                torch.testing.assert_close(got, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")
                count += 1
    return count


def tensor_parallel(block, mesh, *, is_first):
    """Split a block's matrices; between blocks activations are DTensors that are cut along time."""
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if not is_first:
        parallelize_module(block, mesh, WholeInput())
    parallelize_module(block, mesh, ShardedOutput())


def check() -> tuple[dict[str, str], int]:
    """Do all of it."""
    return check_data_parallel(), check_tensor_parallel()
