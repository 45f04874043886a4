from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_train.errors import ConfigError
from vescale_train.optim.fsdp import data_mesh


@pytest.fixture
def mesh():
    """Return a function that makes a mesh of eight ranks that do not talk."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield lambda shape, names: init_device_mesh("cpu", shape, mesh_dim_names=names)
    dist.destroy_process_group()


def test_a_model_is_replicated_over_dp_and_sharded_over_fsdp(mesh):
    whole = mesh((2, 2, 2), ("dp", "fsdp", "tp"))
    assert data_mesh(whole).mesh_dim_names == ("dp", "fsdp")
    assert data_mesh(mesh((4, 2), ("dp", "tp"))).mesh_dim_names == ("dp",)
    assert data_mesh(mesh((8,), ("anything",))).mesh_dim_names == ("anything",)
    with pytest.raises(ConfigError, match="no axis 'dp' or 'fsdp'"):
        data_mesh(mesh((4, 2), ("pp", "tp")))


@pytest.mark.distributed
def test_sharded_models_train_as_one_device_and_save_for_any_other(more_world):
    found = [rank["fully sharded"] for rank in more_world]
    assert all(len(rank) == 5 and all(rank.values()) for rank in found), found[0]
