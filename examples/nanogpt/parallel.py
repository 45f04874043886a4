"""How the model is cut: torch's own tensor parallelism (DTensor) along "tp", then FSDP2 along "dp".

The checkpoint library needs none of this told: it reads from every parameter how it is laid out.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model import GPT
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's place among those that train together."""

    rank: int
    num_ranks: int
    mesh: DeviceMesh | None
    """Axes "dp" and "tp"; None in a single process, which needs no process group at all."""

    @classmethod
    def join(cls, dp: int, tp: int) -> World:
        """Meet the other ranks that the launcher (torchrun, or the demo) announces in the environment.

        Raises:
            ValueError: if the launcher started another number of processes than dp x tp.
        """
        rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if dp * tp != num_ranks:
            raise ValueError(f"dp {dp} x tp {tp} needs {dp * tp} processes, but the launcher started {num_ranks}")
        if num_ranks == 1:
            return cls(rank=0, num_ranks=1, mesh=None)
        dist.init_process_group("gloo")
        return cls(rank=rank, num_ranks=num_ranks, mesh=init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp")))

    def size(self, axis: str) -> int:
        """Return the number of ranks along a mesh axis."""
        return 1 if self.mesh is None else self.mesh[axis].size()

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along a mesh axis."""
        return 0 if self.mesh is None else self.mesh[axis].get_local_rank()

    def mean_over_dp(self, value: Tensor) -> float:
        """Return the mean of a number over the data-parallel ranks."""
        value = value.detach().clone()
        if self.mesh is not None and self.size("dp") > 1:
            dist.all_reduce(value, group=self.mesh.get_group("dp"))
            value /= self.size("dp")
        return value.item()

    def total(self, *numbers: int) -> list[int]:
        """Return the sum over all ranks of each number."""
        values = torch.tensor(numbers)
        if self.mesh is not None:
            dist.all_reduce(values)
        return values.tolist()

    def leave(self) -> None:
        """Say goodbye to the other ranks, after the last of them is done."""
        if self.mesh is not None:
            dist.barrier()
            dist.destroy_process_group()


def parallelize(model: GPT, world: World) -> None:
    """Cut the model in place as the world's mesh says; a single process keeps it whole."""
    if world.mesh is None:
        return
    if world.size("tp") > 1:
        parallelize_module(model, world.mesh["tp"], tensor_parallel_plan(len(model.blocks)))
        model.tie_weights()
    if world.size("dp") > 1:
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh["dp"])
        fully_shard(model, mesh=world.mesh["dp"])


def tensor_parallel_plan(num_blocks: int) -> dict[str, ParallelStyle]:
    """Return which matrices are cut by columns and which by rows; norms stay whole on every rank."""
    plan: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(num_blocks):
        block = f"blocks.{index}"
        plan |= {f"{block}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {f"{block}.attention.output": RowwiseParallel()}
        plan |= {f"{block}.mlp.up": ColwiseParallel(), f"{block}.mlp.down": RowwiseParallel()}
    return plan


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of which this rank may hold a part; collective, and on every rank."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and every moment whole, under its name in the store; collective.

    It is for checking. The checkpoint library never gathers a tensor, and has no need to.
    """
    # torch warns that two gathers one after another are slow; right, and of no interest here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"model.{name}", whole(parameter)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            yield f"optimizer.state.{name}.{key}", whole(value)
