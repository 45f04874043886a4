"""The data-parallel group: the ranks that hold the same part of the model and see different data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_train.errors import ConfigError
from vescale_train.torch_private import flatten_mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA_AXES = ("dp", "fsdp")
"""Mesh axes along which ranks see different data."""


def data_group(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group over which gradients are summed; None if this rank is alone in it.

    Args:
        mesh: a group; a mesh of one axis, whatever its name; a mesh of several, of which the axes ``dp`` and ``fsdp``
            count (without them nothing is data-parallel); or None for all ranks.

    Raises:
        ConfigError: the mesh has several axes and no names for them.
    """
    if mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError(
            f"cannot tell the data-parallel axis of a mesh of shape {tuple(mesh.shape)} without names; pass its slice, "
            f"or name the axes with mesh_dim_names"
        )
    return _group_of(mesh, [axis for axis in DATA_AXES if axis in names])


def _group_of(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup | None:
    if not axes:
        return None
    if len(axes) == 1:
        return mesh[axes[0]].get_group()
    return flatten_mesh(mesh[tuple(axes)], "_".join(axes)).get_group()
