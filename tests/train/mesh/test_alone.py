"""One process without torchrun, and what is refused there."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale_train.errors import ConfigError, StateError
from vescale_train.mesh import VESCALE_DEVICE_MESH, coordinate, init, made, names


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher started; what was started is ended."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(made, "_made", [])
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process_is_a_world_of_one(alone):
    mesh = init(tp=1, device="cpu")
    assert coordinate(mesh) == {"tp": 0}
    assert coordinate(init(device="cpu")) == {"dp": 0}
    assert VESCALE_DEVICE_MESH.is_first_stage()
    assert VESCALE_DEVICE_MESH.is_last_stage()
    with pytest.raises(ConfigError, match="cannot slice \\('tp',\\)"):
        VESCALE_DEVICE_MESH["tp"]
    with pytest.raises(ConfigError, match="cannot list the pp axes"):
        VESCALE_DEVICE_MESH.get_global_pipeline_parallel_meshes()
    with pytest.raises(ConfigError, match="rank 7 stands"):
        VESCALE_DEVICE_MESH.get_strategy_coordinate(7)
    with pytest.raises(ConfigError, match="by name"):
        names(init_device_mesh("cpu", (1,)))


def test_half_of_a_launchers_environment_is_refused(alone):
    alone.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not in the environment"):
        init(device="cpu")


def test_no_timeout_is_refused_and_no_mesh_is_said(alone):
    with pytest.raises(ConfigError, match="a timeout is more than 0"):
        init(timeout_seconds=0)
    with pytest.raises(StateError, match="there is no mesh yet"):
        VESCALE_DEVICE_MESH.get()
    with pytest.raises(ConfigError, match="cannot name the 4 axes"):
        VESCALE_DEVICE_MESH.init_device_mesh("cpu", (1, 1, 1, 1))
    assert VESCALE_DEVICE_MESH.get(device_type="cpu", mesh_shape=(1, 1)).mesh_dim_names == ("DP", "TP")
