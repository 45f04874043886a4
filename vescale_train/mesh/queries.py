"""Questions to a mesh by the names of its axes; an axis that is not there has size 1 and coordinate 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_train.errors import ConfigError
from vescale_train.mesh.axes import BATCH_AXES
from vescale_train.torch_private import flatten_mesh, root_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the axes, outermost first.

    Raises:
        ConfigError: if the mesh's axes have no names.
    """
    if mesh.mesh_dim_names is None:
        raise ConfigError(f"cannot ask {mesh} by name: its axes have none; pass mesh_dim_names when it is made")
    return mesh.mesh_dim_names


def axis(mesh: DeviceMesh, *asked: str) -> DeviceMesh | None:
    """Return the part of the mesh along these axes, in the mesh's own order whatever the order asked, or None.

    Axes that the mesh does not have are passed over; None if it has none of them. Case does not count.
    """
    wanted = {name.lower() for name in asked}
    there = tuple(name for name in names(mesh) if name.lower() in wanted)
    if not there:
        return None
    return mesh if there == mesh.mesh_dim_names else mesh[there]


def size(mesh: DeviceMesh, name: str) -> int:
    """Return how many ranks lie along an axis; 1 if the mesh does not have it. Case does not count."""
    there = [own.lower() for own in names(mesh)]
    return mesh.size(there.index(name.lower())) if name.lower() in there else 1


def coordinate(mesh: DeviceMesh) -> dict[str, int]:
    """Return this rank's position along every axis of the mesh, by the axis's name in lower case.

    Raises:
        ConfigError: if this rank is not in the mesh.
    """
    found = mesh.get_coordinate()
    if found is None:
        raise ConfigError(f"cannot say where this rank stands: it is not in {mesh}")
    return dict(zip((name.lower() for name in names(mesh)), found, strict=True))


def batch_group(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the ranks that see different data, dp x fsdp, as a mesh of one axis, or None if all see the same.

    Its rank order is that of the mesh: dp outside, fsdp inside. ``.get_group()`` gives the process group. The first
    call of a mesh makes the group and is collective.
    """
    part = axis(mesh, *BATCH_AXES)
    if part is None or part.ndim == 1:
        return part
    return flatten_mesh(part, "_".join(BATCH_AXES))


def lookup_rank(mesh: DeviceMesh, name: str) -> int:
    """Return this rank's position along one axis; 0 if the mesh does not have it."""
    return coordinate(mesh).get(name.lower(), 0)


def whole(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from, or itself."""
    return root_mesh(mesh)
