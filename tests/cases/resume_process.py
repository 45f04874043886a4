"""One process of a training run that is saved, and of the one that goes on: run as a script, with another seed.

``save FOLDER SEED`` trains, saves half-way, and goes on; ``resume FOLDER SEED`` starts afresh, loads, and goes on. Both
print what the second half came to, as exact numbers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import vescale_ckpt as vc

HALF, END = 7, 16
NUM_ITEMS, BATCH, ACCUMULATE = 23, 4, 2


class Run:
    """A training loop that owns everything random: dropout, shuffling, noise of three generators."""

    def __init__(self, kind: str) -> None:
        data = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(NUM_ITEMS, 5, generator=data), torch.randn(NUM_ITEMS, 2, generator=data)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
        if kind == "masters":
            self.model = self.model.to(torch.bfloat16)
        self.optimizer = self._optimizer(kind)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: min(1.0, (k + 1) / 5) * 0.97**k)
        self.kind = kind
        self.numpy = np.random.default_rng()
        self.masters = [p.detach().float() for p in self.model.parameters()] if kind == "masters" else []
        self.position = {"epoch": -1, "at": NUM_ITEMS, "order": torch.arange(NUM_ITEMS), "updates": 0}

    def _optimizer(self, kind: str) -> torch.optim.Optimizer:
        if kind == "groups":
            first, norm, last = self.model[0], self.model[1], self.model[4]
            return torch.optim.AdamW(
                [
                    {"params": first.parameters(), "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0},
                    {"params": norm.parameters(), "lr": 5e-3, "tag": "norm"},
                    {"params": [], "lr": 7e-3},
                    {"params": last.parameters(), "lr": 2e-2, "amsgrad": True},
                ]
            )
        if kind == "sgd":
            return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, in the manner of a user of the library."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "masters": self.masters,
            "position": self.position,
            "rng": vc.PerRank(
                {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": self.numpy.bit_generator.state}
            ),
        }

    def restore(self, ckpt: vc.Checkpointer, step: int) -> None:
        """Load into this run's objects."""
        state = self.state()
        ckpt.load(state, step)
        rng = state["rng"].value
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
        self.numpy.bit_generator.state = rng["numpy"]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch; a new epoch shuffles with the global generator."""
        at = self.position
        if at["at"] + BATCH > NUM_ITEMS:
            at["order"], at["at"], at["epoch"] = torch.randperm(NUM_ITEMS), 0, at["epoch"] + 1
        index = at["order"][at["at"] : at["at"] + BATCH]
        at["at"] += BATCH
        return self.x[index] + 0.01 * random.random() + 0.01 * self.numpy.random(), self.y[index]

    def update(self) -> float:
        """Make one update and return its loss."""
        self.optimizer.zero_grad()
        total = 0.0
        dtype = next(self.model.parameters()).dtype
        for _ in range(ACCUMULATE):
            x, y = self.batch()
            loss = (self.model(x.to(dtype)).float() - y).pow(2).mean() / ACCUMULATE
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=False):
            master.add_(parameter.detach().float() * 2**-12)  # low bits that the weights do not have
        self.scheduler.step()
        self.position["updates"] += 1
        return total

    def run(self, updates: int) -> list[str]:
        """Train until so many updates; return the losses to the last bit."""
        return [self.update().hex() for _ in range(self.position["updates"], updates)]

    def digest(self) -> list[str]:
        """Return all numbers that a resume must agree in."""
        tensors = [*self.model.state_dict().values(), *self.masters]
        for parameter in self.model.parameters():
            tensors += [v for v in self.optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
        sums = [str(t.detach().contiguous().reshape(-1).view(torch.uint8).long().mul(31).sum().item()) for t in tensors]
        return [*sums, repr(self.scheduler.get_last_lr()), str(self.position["epoch"]), repr(torch.rand(2).tolist())]


KINDS = ("adamw", "groups", "sgd", "masters")


def main() -> None:
    """Be one process."""
    torch.set_num_threads(1)
    verb, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    store = vc.open_store(folder / "store")
    found = {}
    for kind in KINDS:
        torch.manual_seed(seed)
        random.seed(seed)
        run = Run(kind)
        run.numpy = np.random.default_rng(seed)
        with vc.Checkpointer(store, kind) as ckpt:
            if verb == "save":
                run.run(HALF)
                ckpt.save(HALF, run.state(), blocking=kind == "sgd")
            else:
                run.restore(ckpt, HALF)
            found[kind] = {"losses": run.run(END), "digest": run.digest()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
