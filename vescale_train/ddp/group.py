"""The data-parallel group: the ranks that hold the same part of the model and see different data."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_train.mesh import AXES, batch_group


def data_group(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group over which gradients are summed; None if this rank is alone in it.

    Args:
        mesh: a group; a mesh, of which the axes ``dp`` and ``fsdp`` count (without them nothing is data-parallel); a
            mesh of one axis that has no name, or one of the caller's own; or None for all ranks.

    Raises:
        ConfigError: the mesh has several axes and no names for them.
    """
    if mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim == 1 and not set(mesh.mesh_dim_names or ()) & set(AXES):
        return mesh.get_group()
    found = batch_group(mesh)
    return None if found is None else found.get_group()
