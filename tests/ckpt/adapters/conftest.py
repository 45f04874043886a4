"""The in-memory store and a process group without processes, as fixtures.

Test files of one name may repeat, so none can be imported by name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def _load(name):
    spec = importlib.util.spec_from_file_location(f"adapters_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_MEMORY = _load("memory_store")


@pytest.fixture
def memory():
    """Return the module of the in-memory store."""
    return _MEMORY


@pytest.fixture
def fake_world():
    """Return a function that makes this process a rank of a world that does not talk."""

    def start(rank, world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
