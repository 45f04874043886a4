"""veScale's name for it, in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_train.dmodule import is_dmodule
from vescale_train.errors import ConfigError
from vescale_train.mesh import init
from vescale_train.planner import auto_parallelize_module


@pytest.fixture
def mesh(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield init(tp=1, device="cpu")
    dist.destroy_process_group()


def test_a_module_is_made_parallel_without_a_plan(mesh):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    assert auto_parallelize_module(model, mesh, policy="MEGATRON") is model
    assert is_dmodule(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ConfigError, match="the policies are auto, megatron"):
        auto_parallelize_module(nn.Linear(1, 1), mesh, policy="guess")
