"""What the ranks of ``test_layouts.py`` do: models made without memory, cut, and given the values of one device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.train.engine import gpt
from tests.train.models import llama
from vescale_ckpt import Checkpointer, open_store
from vescale_train import mesh as meshes
from vescale_train.engine import optimizer, parallelize, step
from vescale_train.engine.deferred import deferred_init, materialize

MODELS = {"gpt": (gpt.GPT, gpt.PLAN), "llama": (llama, "auto")}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(model, want):
    """Return the names of tensors that are not those of one device, to the bit."""
    theirs = {**dict(want.named_parameters()), **dict(want.named_buffers())}
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(whole(tensor), theirs[name])]


def all_of_it(folder):
    mesh = meshes.init(tp=2, device="cpu")
    found = {}
    for name, (make, plan) in MODELS.items():
        torch.manual_seed(3)
        want = make()
        model = parallelize(deferred_init(make), mesh, plan, exact=True)
        cut = [key for key, tensor in model.named_parameters() if tensor.to_local().numel() < tensor.numel()]
        torch.manual_seed(3)
        materialize(model)
        empty = parallelize(deferred_init(make), mesh, plan)
        materialize(empty, initialize=False)
        with open_store(Path(folder) / name) as store, Checkpointer(store, "run") as checkpointer:
            checkpointer.save(1, {"model": model})
            checkpointer.load({"model": empty})
        found[name] = [differing(model, want), len(cut), differing(empty, want)]
    found["losses"] = [train(mesh, late) for late in (False, True)]
    return found


def train(mesh, late):
    """Train what was made at once or late, and return the losses."""
    torch.manual_seed(3)
    model = parallelize(deferred_init(gpt.GPT) if late else gpt.GPT(), mesh, gpt.PLAN)
    if late:
        materialize(model)
    optim = optimizer(model, torch.optim.AdamW, lr=1e-2)
    tokens = torch.arange(32).reshape(4, 8)
    return [step(model, optim, (tokens, tokens), loss_fn=gpt.loss_fn).item() for _ in range(3)]
