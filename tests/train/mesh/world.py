"""What the ranks of a real world ask their mesh."""

from __future__ import annotations

import torch.distributed as dist

from vescale_train.errors import ConfigError
from vescale_train.mesh import (
    VESCALE_DEVICE_MESH,
    axis,
    batch_group,
    coordinate,
    current,
    init,
    init_distributed,
    lookup_rank,
    size,
)


def ranks(mesh):
    return mesh.mesh.tolist()


def own():
    """Return the answers of a mesh of our own."""
    mesh = init(tp=2, dp=-1, fsdp=1, timeout_seconds=30)
    assert current() is mesh
    batch = batch_group(mesh)
    assert batch_group(mesh).get_group() == batch.get_group()
    try:
        init(tp=3)
    except ConfigError as error:
        refused = str(error)
    return {
        "names": mesh.mesh_dim_names,
        "shape": mesh.shape,
        "coordinate": coordinate(mesh),
        "any order": [axis(mesh, "tp", "dp").mesh_dim_names, ranks(axis(mesh, "tp", "dp"))],
        "slice": ranks(axis(mesh, "tp")),
        "all": axis(mesh, "dp", "fsdp", "tp") is mesh,
        "absent": axis(mesh, "pp", "cp") is None,
        "sizes": [size(mesh, name) for name in ("dp", "fsdp", "tp", "pp")],
        "batch": ranks(batch),
        "batch of a slice": batch_group(axis(mesh, "tp")) is None,
        "lookup": [lookup_rank(mesh, name) for name in ("dp", "tp", "ep")],
        "refused": refused,
    }


def vescale():
    """Return the answers of veScale's global mesh object."""
    init_distributed()
    mesh = VESCALE_DEVICE_MESH.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("PP", "DP", "TP"))
    asked = VESCALE_DEVICE_MESH
    assert asked.get() is mesh
    assert asked.get(device_type="cpu", mesh_shape=(4,)) is mesh
    return {
        "shape": asked.shape,
        "ndim": asked.ndim,
        "coordinate": asked.get_strategy_coordinate(),
        "another": asked.get_strategy_coordinate(3),
        "sizes": [asked.get_strategy_size(dim) for dim in ("PP", "DP", "TP", 0, "tensor")],
        "ranks": [
            asked.get_pipeline_parallel_rank(),
            asked.get_data_parallel_rank(),
            asked.get_tensor_parallel_rank(),
            asked.lookup_rank("TP"),
            asked.lookup_rank(0),
        ],
        "meshes": [
            ranks(asked.get_pipeline_parallel_mesh()),
            ranks(asked.get_data_parallel_mesh()),
            ranks(asked.get_tensor_parallel_mesh()),
        ],
        "all": [
            [ranks(one) for one in asked.get_global_pipeline_parallel_meshes()],
            [ranks(one) for one in asked.get_global_data_parallel_meshes()],
            [ranks(one) for one in asked.get_global_tensor_parallel_meshes()],
        ],
        "groups": [
            dist.get_process_group_ranks(asked.get_data_parallel_dim_groups()),
            dist.get_process_group_ranks(asked.get_tensor_parallel_dim_groups()),
        ],
        "stages": [asked.is_first_stage(), asked.is_last_stage()],
        "slice": ranks(asked["TP", "PP"]),
    }


def main():
    return {"own": own(), "vescale": vescale()}
