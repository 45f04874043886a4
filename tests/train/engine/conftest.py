from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_train import mesh as meshes
from vescale_train.engine import parallelize


@pytest.fixture(scope="module")
def mesh():
    """The mesh of this process alone."""
    made = meshes.init(device="cpu")
    yield made
    dist.destroy_process_group()


@pytest.fixture
def model(mesh):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 1))
    return parallelize(layers, mesh)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)


@pytest.fixture
def loss_fn():
    return lambda output, target: (output - target).pow(2).mean()
