"""What the ranks of ``test_stages.py`` do: the lines of a script on meshes with pipeline stages."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.engine import gpt
from vescale_train import mesh as meshes
from vescale_train.data import data
from vescale_train.engine import Checkpoint, evaluate, optimizer, parallelize, step
from vescale_train.pipe import PipelineParallelPlan, PipelineScheduleType

STEPS, SAVED_AT = 4, 2
KINDS = {
    "1f1b": {"schedule_type": PipelineScheduleType.SIMPLE_1F1B},
    "zbv": {"schedule_type": PipelineScheduleType.ZBV},
}


def train_all(folder):
    """Train on one rank's worth of meshes, save, and go on from what the mesh before has saved."""
    found, source = {}, "one" if dist.get_world_size() > 1 else None
    meshes_of = {1: {"one": {"dp": 1}}, 4: {"dp": {"dp": 2, "pp": 2}}}[dist.get_world_size()]
    for name, axes in meshes_of.items():
        mesh = meshes.init(**axes, device="cpu")
        for kind in KINDS if "pp" in axes else ("",):
            run = f"{name}{kind}"
            found[run] = train(mesh, kind, Path(folder), run, None)
            if source is not None:
                found[f"{run} from {source}"] = train(mesh, kind, Path(folder), source, SAVED_AT)
            source = run
    if dist.get_world_size() > 1:
        mesh = meshes.init(dp=4, device="cpu")
        found[f"dp=4 from {source}"] = train(mesh, "", Path(folder), source, SAVED_AT)
    return found


def train(mesh, kind, folder, run, resumed_at):
    pipeline = PipelineParallelPlan(num_microbatches=4, **KINDS[kind]) if kind else None
    model = parallelize(gpt.make(layers=4), mesh, {}, pipeline=pipeline)
    optim = optimizer(model, torch.optim.AdamW, lr=1e-2, clip_grad=0.5, zero=0)
    batches = data(gpt.Tokens(), mesh, global_batch=gpt.GLOBAL_BATCH, seed=5, steps=STEPS)
    losses = []
    with Checkpoint(folder / "store", run, every=SAVED_AT, data=batches) as checkpoint:
        if resumed_at is not None:
            checkpoint.resume(model, optim, step=resumed_at)
        for batch in batches:
            losses.append(float(step(model, optim, batch, loss_fn=gpt.loss_fn)))
            if resumed_at is None:
                checkpoint.maybe_save(model, optim)
    held_out = data(gpt.Tokens(), mesh, global_batch=8, shuffle=False, steps=2)
    return {
        "losses": losses,
        "norm": float(optim.grad_norm),
        "evaluated": float(evaluate(model, held_out, loss_fn=gpt.loss_fn)),
    }
