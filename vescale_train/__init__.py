"""The training engine and the pipeline runtime that stand on the checkpoint store.

Names are looked up when they are asked for: a script that only wants the mesh imports no more than that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vescale_train.data import data

if TYPE_CHECKING:
    from vescale_train.ddp import DDPOptions, DistributedDataParallel
    from vescale_train.engine import Checkpoint, evaluate, optimizer, parallelize, step
    from vescale_train.mesh import init
    from vescale_train.metrics import Meter, Progress
    from vescale_train.optim import (
        BasicOptimizer,
        DistributedOptimizer,
        MuonByOwner,
        clip_grad_norm,
        fully_shard_policy,
        recompute_activations,
    )
    from vescale_train.ragged import RaggedShard
    from vescale_train.timeline import flush, init_ndtimers, ndtimeit, wait

__all__ = [
    "BasicOptimizer",
    "Checkpoint",
    "DDPOptions",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Meter",
    "MuonByOwner",
    "Progress",
    "RaggedShard",
    "clip_grad_norm",
    "data",
    "evaluate",
    "flush",
    "fully_shard_policy",
    "init",
    "init_ndtimers",
    "ndtimeit",
    "optimizer",
    "parallelize",
    "recompute_activations",
    "step",
    "wait",
]

_ROOMS = {
    "ddp": ("DDPOptions", "DistributedDataParallel"),
    "engine": ("Checkpoint", "evaluate", "optimizer", "parallelize", "step"),
    "mesh": ("init",),
    "metrics": ("Meter", "Progress"),
    "optim": (
        "BasicOptimizer",
        "DistributedOptimizer",
        "MuonByOwner",
        "clip_grad_norm",
        "fully_shard_policy",
        "recompute_activations",
    ),
    "ragged": ("RaggedShard",),
    "timeline": ("flush", "init_ndtimers", "ndtimeit", "wait"),
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
