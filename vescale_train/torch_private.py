"""Every private name of torch that the training package uses, in one place, so that a new torch is one file's work."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import HashStore
from torch.autograd import Variable
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache, ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "HashStore",
    "StridedShard",
    "TorchDispatchMode",
    "all_submeshes",
    "default_store",
    "dtensor_handlers",
    "extend_operations",
    "extend_redistribution",
    "fill_truncated_normal",
    "flatten_mesh",
    "function_modes",
    "group_timeout",
    "is_in_backward",
    "is_mutating",
    "no_torch_function",
    "on_backward_end",
    "replaced_kernels",
    "replaced_truncated_normal",
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


def all_submeshes(mesh: DeviceMesh, name: str) -> list[DeviceMesh]:
    """Return every mesh along one axis, also those that this rank is not in."""
    return mesh._get_all_submeshes(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from, or itself."""
    return mesh._get_root_mesh()


def is_mutating(operation: Any) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(operation._schema.is_mutable)


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


def function_modes() -> list[Any]:
    """Return the modes that see torch's functions in this thread, outermost first."""
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def is_in_backward() -> bool:
    """Return whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Return the table of what is called for an operation of DTensors in place of torch's; it may be changed."""
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


@contextmanager
def replaced_kernels(kernels: Mapping[Any, Callable[..., Any]], device_type: str) -> Iterator[None]:
    """Put kernels in the place of torch's for plain tensors of a device, for the time of the block.

    A call that names a generator still goes to torch's kernel.
    """
    key = device_type.upper()
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced, which is what was asked for
            for op, kernel in kernels.items():
                library.impl(op, _unless_generator(kernel, torch.library.get_kernel(op, key), keyset), key)
        yield
    finally:
        library._destroy()


def _unless_generator(kernel: Callable[..., Any], stock: Any, keyset: Any) -> Callable[..., Any]:
    def choose(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        if generator is None:
            return kernel(*args, **kwargs)
        return stock.call_boxed(keyset, *args, generator=generator, **kwargs)

    return choose


fill_truncated_normal = torch.nn.init._no_grad_trunc_normal_
"""What ``trunc_normal_`` of torch does, (tensor, mean, std, a, b, generator=): nothing on the meta device."""


@contextmanager
def replaced_truncated_normal(fill: Callable[..., Any]) -> Iterator[None]:
    """Let ``trunc_normal_`` of torch call ``fill(tensor, mean, std, a, b, generator=)`` inside the block."""
    before = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = fill
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = before


def extend_redistribution(
    is_ours: Callable[[tuple[Placement, ...], tuple[Placement, ...]], bool],
    redistribute: Callable[..., torch.Tensor],
) -> None:
    """Let ``redistribute(local, shape, mesh, (old, new), torch_move)`` do what ``is_ours(old, new)`` says.

    ``torch_move(local, old, new)`` is torch's own way, for placements that it knows.
    """
    stock = _redistribute.redistribute_local_tensor

    def extended(
        local_tensor: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        move = (current_spec.placements, target_spec.placements)
        if not is_ours(*move):
            return stock(local_tensor, current_spec, target_spec, **options)
        meta: Any = current_spec.tensor_meta or target_spec.tensor_meta

        def torch_move(local: torch.Tensor, old: tuple[Placement, ...], new: tuple[Placement, ...]) -> torch.Tensor:
            before, after = (DTensorSpec(current_spec.mesh, cuts, tensor_meta=meta) for cuts in (old, new))
            return stock(local, before, after, **options)

        return redistribute(local_tensor, tuple(meta.shape), current_spec.mesh, move, torch_move)

    for module in (_redistribute, _dispatch, _api):
        module.redistribute_local_tensor = extended  # type: ignore[attr-defined]


def extend_operations(placements_of: Callable[[Any, list[DTensorSpec]], tuple[Placement, ...] | None]) -> None:
    """Let ``placements_of(op, specs of its DTensors)`` say the placements of an operation's one result.

    The operation then runs on the local tensors as they are. None leaves it to torch. Torch remembers the answer.
    """
    stock: Any = ShardingPropagator.propagate_op_sharding_non_cached

    def extended(self: Any, op_schema: Any) -> Any:
        placements = placements_of(op_schema.op, list(op_schema.args_spec))
        if placements is None:
            return stock(self, op_schema)
        meta = self._propagate_tensor_meta_non_cached(op_schema)
        mesh = op_schema.args_spec[0].mesh
        return OutputSharding(DTensorSpec(mesh, placements, tensor_meta=meta))

    ShardingPropagator.propagate_op_sharding_non_cached = extended  # type: ignore[method-assign]
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding = LocalLRUCache(propagator.propagate_op_sharding_non_cached)
