"""Worlds that save a pipeline and worlds that go on from it with other stages: new processes, other seeds."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import vescale_ckpt as vc
from tests.train.pipe.models import MODELS
from tests.train.pipe.world import reference
from vescale_train.pipe import PipeEngine, PipelineParallelPlan, construct_pipeline_stage

SHAPES = {1: ((1,), ("pp",)), 2: ((2,), ("pp",)), 4: ((4,), ("pp",))}


def pipeline(kind, chunks, *, seed=None):
    """Return an engine over all ranks, its optimizer and its minibatch; with a seed, other weights than the list's."""
    model, loss_fn, minibatch = MODELS["tied"]()
    if seed is not None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    plan = PipelineParallelPlan(num_microbatches=8, schedule_type=kind, virtual_chunks=chunks)
    engine = PipeEngine(construct_pipeline_stage(model, plan, mesh), mesh, loss_fn)
    return engine, optimizer_of(engine.stage), minibatch


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def train(engine, optimizer, minibatch, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(engine(minibatch)[0]))
        optimizer.step()
    return losses


def save(folder: str, kind: str, chunks: int) -> list[float]:
    """Train two steps and save."""
    engine, optimizer, minibatch = pipeline(kind, chunks)
    losses = train(engine, optimizer, minibatch, 2)
    with vc.Checkpointer(vc.open_store(Path(folder) / "store"), f"{kind}-{chunks}-{dist.get_world_size()}") as ckpt:
        ckpt.save(2, {"model": engine.stage, "optimizer": optimizer})
    return losses


def resume(folder: str, runs: list[str], kind: str, chunks: int) -> list[list[float]]:
    """Go on from each run with the stages of this world; return the losses of two steps more."""
    found = []
    for run in runs:
        engine, optimizer, minibatch = pipeline(kind, chunks, seed=77 + dist.get_rank())
        with vc.Checkpointer(vc.open_store(Path(folder) / "store"), run) as ckpt:
            ckpt.load({"model": engine.stage, "optimizer": optimizer}, 2)
        found.append(train(engine, optimizer, minibatch, 2))
    return found


def uninterrupted(steps: int = 4) -> list[float]:
    """Return the losses of one process without a pipeline."""
    model, loss_fn, minibatch = MODELS["tied"]()
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(steps):
        loss, _, done = reference(model, loss_fn, minibatch, 8)
        for parameter, other in zip(model.parameters(), done.parameters(), strict=True):
            parameter.grad = copy.copy(other.grad)
        optimizer.step()
        losses.append(float(loss))
    return losses
