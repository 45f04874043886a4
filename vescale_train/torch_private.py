"""Every private name of torch that the training package uses, in one place, so that a new torch is one file's work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import HashStore
from torch.autograd import Variable
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "HashStore",
    "StridedShard",
    "default_store",
    "flatten_mesh",
    "group_timeout",
    "no_torch_function",
    "on_backward_end",
    "root_mesh",
    "set_group_timeout",
    "set_local",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh of one axis that runs over all axes of ``mesh``; asked again, the same one."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from, or itself."""
    return mesh._get_root_mesh()


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Make a ``DTensor`` live in other memory of the same local shape, stride and dtype."""
    tensor._local_tensor = local


def default_store() -> Store:
    """Return the rendezvous store of the default process group."""
    return _get_default_store()


def group_timeout(group: ProcessGroup) -> timedelta:
    """Return how long the collectives of a group may take."""
    device = group._device_types[0]
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long the collectives of a group may take."""
    _set_pg_timeout(timeout, group)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call back once when the backward pass that is running has made all gradients; only valid inside of one."""
    Variable._execution_engine.queue_callback(callback)


def no_torch_function() -> AbstractContextManager[None]:
    """Return a context in which torch's functions are seen by no mode."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context
