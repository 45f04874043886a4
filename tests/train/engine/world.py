"""What the ranks of ``test_meshes.py`` do: train on every mesh of their number, and go on from what others saved."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.train.engine import gpt
from vescale_train import mesh as meshes
from vescale_train.data import data
from vescale_train.engine import Checkpoint, evaluate, optimizer, parallelize, progress_of, step
from vescale_train.rng import single_device_rng

STEPS, SAVED_AT = 4, 2
MESHES = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2}],
    4: [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "fsdp": 2}, {"tp": 4}],
}


def name_of(axes, zero, exact):
    return f"{','.join(f'{name}={size}' for name, size in axes.items())} zero {zero} {'exact' if exact else 'fast'}"


def train_all(folder, source, dropout):
    """Train on all meshes of this world's size, and return what each gave, by its name."""
    results = {}
    for axes in MESHES[dist.get_world_size()]:
        mesh = meshes.init(**axes, device="cpu")
        for exact in (True, False):
            for zero in (0, 1, 2) if "dp" in axes else (0,):
                name = name_of(axes, zero, exact)
                results[name] = train(mesh, zero, exact, Path(folder), name, dropout)
                mode = "exact" if exact else "fast"
                for other in source:
                    if other.endswith(mode) and zero < 2:
                        results[f"{name} from {other}"] = go_on(mesh, zero, exact, Path(folder), other, dropout)
    return results


def set_up(mesh, zero, exact, dropout):
    model = parallelize(gpt.make(dropout), mesh, gpt.PLAN, exact=exact, seed=11)
    optim = optimizer(model, torch.optim.AdamW, parameters=gpt.groups(model), lr=1e-2, clip_grad=0.5, zero=zero)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda k: min(1.0, (k + 1) / 4))
    return model, optim, schedule, data(gpt.Tokens(), mesh, global_batch=gpt.GLOBAL_BATCH, seed=5, steps=STEPS)


def train(mesh, zero, exact, folder, name, dropout):
    model, optim, schedule, batches = set_up(mesh, zero, exact, dropout)
    losses = []
    with (
        numbers_of_one_device(model, exact),
        Checkpoint(
            folder / "store",
            name.replace(" ", "_").replace(",", "_").replace("=", ""),
            every=SAVED_AT,
            data=batches,
            schedule=schedule,
        ) as checkpoint,
    ):
        for batch in batches:
            losses.append(one_step(model, optim, schedule, batch))
            checkpoint.maybe_save(model, optim)
    loss = evaluate(
        model, data(gpt.Tokens(), mesh, global_batch=8, shuffle=False, steps=2), loss_fn=gpt.loss_fn, micro_batches=4
    )
    return {"losses": losses, "digest": digest(model), "evaluated": float(loss), "norm": float(optim.grad_norm)}


def go_on(mesh, zero, exact, folder, other, dropout):
    model, optim, schedule, batches = set_up(mesh, zero, exact, dropout)
    run = other.replace(" ", "_").replace(",", "_").replace("=", "")
    with Checkpoint(folder / "store", run, data=batches, schedule=schedule) as checkpoint:
        resumed = checkpoint.resume(model, optim, step=SAVED_AT)
    with numbers_of_one_device(model, exact):
        losses = [one_step(model, optim, schedule, batch) for batch in batches]
    return {"losses": losses, "digest": digest(model), "resumed": [resumed, progress_of(model).step]}


def numbers_of_one_device(model, exact):
    """In exact mode they are by themselves; in fast mode they are asked for, to have dropout to compare."""
    return contextlib.nullcontext() if exact else single_device_rng(11, model)


def one_step(model, optim, schedule, batch):
    loss = step(model, optim, batch, loss_fn=gpt.loss_fn, micro_batches=gpt.MICRO_BATCHES, scheduler=schedule)
    return float(loss)


def digest(model):
    """Return a hash of all parameters, whole: equal if and only if all bits are."""
    found = hashlib.sha256()
    for _, parameter in model.named_parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        found.update(whole.contiguous().numpy().tobytes())
    return found.hexdigest()
