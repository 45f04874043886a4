"""Every private name of torch that the training package uses, in one place, so that a new torch is one file's work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._distributed_c10d import HashStore
from torch.autograd import Variable
from torch.distributed.distributed_c10d import _set_pg_timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["HashStore", "flatten_mesh", "on_backward_end", "root_mesh", "set_group_timeout"]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh of one axis that runs over all axes of ``mesh``; asked again, the same one."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from, or itself."""
    return mesh._get_root_mesh()


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long the collectives of a group may take."""
    _set_pg_timeout(timeout, group)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call back once when the backward pass that is running has made all gradients; only valid inside of one."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
