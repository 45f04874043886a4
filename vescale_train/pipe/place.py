"""Where this rank stands in the pipeline, and whom it talks to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.errors import ConfigError
from vescale_train.mesh.queries import axis

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank's place along the pipeline axis."""

    rank: int
    num_ranks: int
    group: ProcessGroup | None
    """None in a process that is alone and has no process group."""
    mesh: DeviceMesh | None
    """The whole mesh, for tensors that are sharded inside a stage."""


def place_of(mesh: DeviceMesh | None) -> Place:
    """Return this rank's place along the mesh's axis ``pp``; a mesh of one axis is that axis, no mesh is one rank.

    Raises:
        ConfigError: the mesh has several axes without names.
    """
    if mesh is None:
        return Place(rank=0, num_ranks=1, group=None, mesh=None)
    if mesh.ndim == 1 and (mesh.mesh_dim_names is None or mesh.mesh_dim_names == ("pp",)):
        part: DeviceMesh | None = mesh
    elif mesh.mesh_dim_names is None:
        raise ConfigError(f"cannot find the pipeline axis of {mesh}: name its axes, and one of them 'pp'")
    else:
        part = axis(mesh, "pp")
    if part is None:
        return Place(rank=0, num_ranks=1, group=None, mesh=mesh)
    return Place(rank=part.get_local_rank(), num_ranks=part.size(), group=part.get_group(), mesh=mesh)
