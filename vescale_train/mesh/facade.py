"""veScale's global mesh object: the same questions under its names, asked of the mesh that was made last."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_train.errors import ConfigError
from vescale_train.mesh.build import TIMEOUT_SECONDS
from vescale_train.mesh.made import current, is_made, use
from vescale_train.mesh.queries import axis, coordinate, lookup_rank, names, size
from vescale_train.mesh.start import default_device, start
from vescale_train.torch_private import all_submeshes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

_ALIASES = {"pipeline": "pp", "data": "dp", "tensor": "tp"}


def init_distributed(device: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Start the process group from torchrun's environment, or alone in one process; no harm if it has started.

    Raises:
        ConfigError: if torchrun's environment is there in part.
    """
    start(device or default_device(), timedelta(seconds=timeout_seconds))


class VeDeviceMesh:
    """The mesh that ``init_device_mesh`` here, or ``vescale_train.init``, made last. Names of axes are free of case."""

    def init_device_mesh(
        self,
        device_type: str,
        mesh_shape: Sequence[int],
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Make the mesh; without names its axes are the last of PP, DP, TP.

        Raises:
            ConfigError: if there are more axes than names for them.
        """
        if mesh_dim_names is None:
            if len(mesh_shape) > 3:
                raise ConfigError(f"cannot name the {len(mesh_shape)} axes of a mesh: pass mesh_dim_names")
            mesh_dim_names = ("PP", "DP", "TP")[3 - len(mesh_shape) :]
        init_distributed(device_type)
        mesh = init_device_mesh(device_type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))
        use(mesh)
        return mesh

    def get(
        self,
        *,
        device_type: str | None = None,
        mesh_shape: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return the mesh; it is made now if there is none and a shape is given.

        Raises:
            StateError: if there is none and no shape is given.
        """
        if not is_made() and mesh_shape is not None:
            return self.init_device_mesh(device_type or default_device(), mesh_shape, mesh_dim_names=mesh_dim_names)
        return current()

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return current().ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along every axis."""
        return tuple(current().shape)

    def __getitem__(self, asked: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (asked,) if isinstance(asked, str) else asked
        found = axis(current(), *wanted)
        if found is None or found.ndim != len(wanted):
            raise ConfigError(f"cannot slice {wanted} out of a mesh with axes {names(current())}")
        return found

    def get_strategy_coordinate(self, local_rank: int | None = None) -> list[int]:
        """Return the coordinate of this rank, or of another rank of the world, along every axis."""
        if local_rank is None:
            return list(coordinate(current()).values())
        where = (current().mesh == local_rank).nonzero().tolist()
        if not where:
            raise ConfigError(f"cannot say where rank {local_rank} stands: it is not in {current()}")
        found: list[int] = where[0]
        return found

    def lookup_rank(self, dim: int | str) -> int:
        """Return this rank's position along an axis, by its name or its number."""
        return lookup_rank(current(), self._name(dim))

    def get_strategy_size(self, dim: int | str) -> int:
        """Return how many ranks lie along an axis; 1 if the mesh does not have it."""
        return size(current(), self._name(dim))

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.lookup_rank("pp")

    def get_data_parallel_rank(self) -> int:
        """Return this rank's replica."""
        return self.lookup_rank("dp")

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's part of the layers."""
        return self.lookup_rank("tp")

    def get_pipeline_parallel_mesh(self) -> DeviceMesh:
        """Return the axis of stages that this rank is on."""
        return self["pp"]

    def get_data_parallel_mesh(self) -> DeviceMesh:
        """Return the axis of replicas that this rank is on."""
        return self["dp"]

    def get_tensor_parallel_mesh(self) -> DeviceMesh:
        """Return the tensor parallel axis that this rank is on."""
        return self["tp"]

    def get_global_pipeline_parallel_meshes(self) -> list[DeviceMesh]:
        """Return every axis of stages in the mesh, also those that this rank is not on."""
        return self._all("pp")

    def get_global_data_parallel_meshes(self) -> list[DeviceMesh]:
        """Return every axis of replicas in the mesh."""
        return self._all("dp")

    def get_global_tensor_parallel_meshes(self) -> list[DeviceMesh]:
        """Return every tensor parallel axis in the mesh."""
        return self._all("tp")

    def get_data_parallel_dim_groups(self) -> ProcessGroup:
        """Return the process group of this rank's replicas."""
        return self["dp"].get_group()

    def get_tensor_parallel_dim_groups(self) -> ProcessGroup:
        """Return the process group of this rank's tensor parallel axis."""
        return self["tp"].get_group()

    def is_first_stage(self) -> bool:
        """Return whether this rank holds the first stage; true without pipeline parallelism."""
        return self.get_pipeline_parallel_rank() == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last stage; true without pipeline parallelism."""
        return self.get_pipeline_parallel_rank() == self.get_strategy_size("pp") - 1

    def _all(self, name: str) -> list[DeviceMesh]:
        mesh = current()
        there = [own for own in names(mesh) if own.lower() == name]
        if not there:
            raise ConfigError(f"cannot list the {name} axes of a mesh with axes {names(mesh)}")
        return all_submeshes(mesh, there[0])

    def _name(self, dim: int | str) -> str:
        if isinstance(dim, int):
            return names(current())[dim]
        return _ALIASES.get(dim.lower(), dim)


VESCALE_DEVICE_MESH = VeDeviceMesh()
"""The one object of its class."""
