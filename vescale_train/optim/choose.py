"""The optimizer of a model: how its state is spread follows from the mesh, and any choice can be made by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_train.ddp import DDPOptions, DistributedDataParallel
from vescale_train.ddp.collectives import group_size
from vescale_train.ddp.group import data_group
from vescale_train.dmodule import attached, is_attached
from vescale_train.errors import ConfigError
from vescale_train.mesh import axis
from vescale_train.optim.basic import BasicOptimizer
from vescale_train.optim.fsdp import fully_shard_policy, is_fully_sharded
from vescale_train.optim.muon import MuonByOwner
from vescale_train.optim.zero import NOT_ELEMENTWISE, DistributedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

Optimizer: TypeAlias = BasicOptimizer | DistributedOptimizer | MuonByOwner


def optimizer(
    model: nn.Module,
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    parameters: Iterable[Any] | None = None,
    mesh: DeviceMesh | None = None,
    zero: int | None = None,
    clip_grad: float = 0.0,
    **options: Any,
) -> Optimizer:
    """Return an optimizer of a model that sums gradients, shards its state, clips, and saves as a plain one.

    Args:
        model: from ``parallelize``, or any with ``mesh``.
        cls: a plain optimizer's class. One that needs whole matrices or parameters is not sharded; torch's Muon gets
            one owner a matrix.
        parameters: what ``cls`` is made with, parameters or groups; None takes all that are trained.
        mesh: the axes ``dp`` and ``fsdp`` are data-parallel, ``pp`` holds stages; None asks the model.
        zero: 0 to 3; None is 1 where several ranks see different data or a parameter is smaller than float32, and 3
            where ``fully_shard`` was applied already.
        clip_grad: largest norm of all gradients together; 0 does not clip.
        options: those of ``cls``, among them ``lr``; and, for data parallelism, ``overlap_grad_reduce``,
            ``accumulate_allreduce_grads_in_fp32``, ``bucket_size``, ``overlap_param_gather``, ``ddp`` (a
            ``DDPOptions``).

    Raises:
        ConfigError: a stage of ZeRO that does not fit the optimizer, or the model's exact mode.
    """
    found = attached(model) if is_attached(model) else None
    mesh = found.mesh if mesh is None and found is not None else mesh
    exact = found is not None and found.exact
    pipeline = _pipeline_group(mesh)
    zero = _stage(model, cls, mesh, zero, exact=exact)
    ours = {key: options.pop(key) for key in _DATA_PARALLEL & set(options)}
    overlap_gather = bool(options.pop("overlap_param_gather", False))
    if zero == 3:
        if not is_fully_sharded(model):
            fully_shard_policy(model, _needed(mesh))
        plain = _make(cls, model, parameters, options)
        return BasicOptimizer(plain, model, clip_grad=clip_grad, pipeline_group=pipeline)
    ours.setdefault("accumulate_allreduce_grads_in_fp32", True)
    ddp_options = ours.pop("ddp", None) or DDPOptions(exact=exact, shard_gradients=zero == 2)
    ddp = DistributedDataParallel(model, mesh, use_distributed_optimizer=zero > 0, options=ddp_options, **ours)
    plain = _make(cls, model, parameters, options)
    if zero == 0:
        wrap = MuonByOwner if isinstance(plain, torch.optim.Muon) else BasicOptimizer
        return wrap(plain, ddp, clip_grad=clip_grad, pipeline_group=pipeline)
    return DistributedOptimizer(
        plain, ddp, clip_grad=clip_grad, overlap_param_gather=overlap_gather, pipeline_group=pipeline
    )


_DATA_PARALLEL = frozenset({"overlap_grad_reduce", "accumulate_allreduce_grads_in_fp32", "bucket_size", "ddp"})


def _stage(
    model: nn.Module, cls: type[torch.optim.Optimizer], mesh: DeviceMesh | None, zero: int | None, *, exact: bool
) -> int:
    """Return the stage of ZeRO: what was asked for, or what suits."""
    if is_fully_sharded(model):
        if zero not in {None, 3}:
            raise ConfigError(f"cannot use ZeRO-{zero}: fully_shard was applied to the model already, which is ZeRO-3")
        zero = 3
    if zero is None:
        zero = 0 if cls.__name__ in NOT_ELEMENTWISE else int(group_size(data_group(mesh)) > 1 or _has_small(model))
    if zero not in range(4):
        raise ConfigError(f"cannot use zero={zero}: the stages of ZeRO are 0 to 3")
    if zero and cls.__name__ in NOT_ELEMENTWISE:
        raise ConfigError(f"cannot use ZeRO-{zero} with {cls.__name__}, which needs whole parameters; use zero=0")
    if zero == 3 and exact:
        raise ConfigError("ZeRO-3 is not exact: fully_shard sums gradients in an order of its own; use zero=0, 1 or 2")
    return zero


def _make(
    cls: type[torch.optim.Optimizer], model: nn.Module, parameters: Iterable[Any] | None, options: dict[str, Any]
) -> torch.optim.Optimizer:
    chosen = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in model.parameters()}
    make: Any = cls
    made: torch.optim.Optimizer = make(chosen, **options)
    if len(meshes) > 1 and made.defaults.get("foreach", False) is None:
        # one kernel over many tensors does not mix those of two meshes
        for group in made.param_groups:
            group["foreach"] = False
    return made


def _has_small(model: nn.Module) -> bool:
    trained = [p for p in model.parameters() if p.requires_grad]
    return any(p.is_floating_point() and p.dtype.itemsize < torch.float32.itemsize for p in trained)


def _pipeline_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    part = None if mesh is None or mesh.mesh_dim_names is None else axis(mesh, "pp")
    return None if part is None or part.size() == 1 else part.get_group()


def _needed(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        raise ConfigError("ZeRO-3 needs a mesh: pass mesh=, or a model from parallelize")
    return mesh
