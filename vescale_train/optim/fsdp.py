"""ZeRO-3 by torch's ``fully_shard``: which modules are sharded as one, over which axes of the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from vescale_train.errors import ConfigError
from vescale_train.mesh import axis
from vescale_train.mesh.axes import BATCH_AXES
from vescale_train.optim.blocks import blocks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

_Model = TypeVar("_Model", bound=nn.Module)


def fully_shard_policy(
    model: _Model,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> _Model:
    """Shard a model's parameters, gradients and optimizer state over the ranks that see different data.

    With the axes ``dp`` and ``fsdp`` it is sharded over ``fsdp`` and replicated over ``dp`` (HSDP), with one of them
    over that one. Tensor parallelism comes first. Make the optimizer afterwards.

    Args:
        model: changed in place; it keeps its parameters' names.
        mesh: of one axis, or with these axes among its names.
        blocks: what is gathered as one, see ``blocks_of``; everything else is one more.
        reshard_after_forward: let go of what was gathered between forward and backward. Zero-bubble and DualPipeV
            pipelines need False.
        param_dtype: compute in this dtype; parameters and optimizer state keep theirs.
        reduce_dtype: sum gradients in this dtype.
        offload: keep parameters, gradients and optimizer state on the CPU.

    Returns:
        The same object.

    Raises:
        ConfigError: no such axis, or a parameter is tied over two blocks.
    """
    over = data_mesh(mesh)
    found = blocks_of(model, blocks)
    refuse_ties(model, found)
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    placing = CPUOffloadPolicy() if offload else OffloadPolicy()
    modules: list[nn.Module] = [*found.values(), model]
    for module in modules:
        fully_shard(
            module,
            mesh=over,
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision,
            offload_policy=placing,
        )
    return model


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a model."""
    return isinstance(model, FSDPModule)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a mesh over which a model is sharded: two, to replicate and to shard, or one.

    Raises:
        ConfigError: there is none.
    """
    if mesh.ndim == 1:
        return mesh
    found = axis(mesh, *BATCH_AXES)
    if found is None:
        raise ConfigError(f"cannot shard over the mesh {mesh}: it has no axis 'dp' or 'fsdp'")
    return found


def refuse_ties(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Refuse a parameter that two blocks, or a block and the rest, would each gather by themselves.

    Raises:
        ConfigError: there is one.
    """
    owner = {id(module): name for name, root in blocks.items() for module in root.modules()}
    first: dict[int, tuple[str, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        block = owner.get(id(module), "")
        for name, parameter in module.named_parameters(prefix, recurse=False):
            before = first.setdefault(id(parameter), (block, name))
            if before[0] != block:
                places = f"'{before[0] or 'no block'}' and in '{block or 'no block'}'"
                raise ConfigError(
                    f"cannot shard '{before[1]}' and '{name}' apart: they are one parameter, in {places}; choose "
                    f"blocks that hold both or neither"
                )
