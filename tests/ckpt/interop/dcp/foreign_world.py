"""Ranks that save with torch's own DCP what is read back without torch's reader."""

from __future__ import annotations

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def tagged(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def save(folder: str) -> list[str]:
    """Rows, columns, both, uneven, replicated, plain and FSDP2 tensors, an optimizer, and plain values."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    fully_shard(model, mesh=flat)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {
        "rows": distribute_tensor(tagged(7, 5), flat, [Shard(0)]),
        "columns": distribute_tensor(tagged(5, 7, dtype=torch.bfloat16), flat, [Shard(1)]),
        "both": distribute_tensor(tagged(8, 6, dtype=torch.int64), mesh, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(tagged(3, 3), mesh, [Replicate(), Shard(0)]),
        "few": distribute_tensor(tagged(2), flat, [Shard(0)]),
        "plain": tagged(4),
        "scalar": torch.tensor(3.5),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "nest": {"a": [1, 2.5, None], "b": "text"},
    }
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    whole = {}
    for prefix, tensors in (("model", model.state_dict()), ("optimizer.state.0", optimizer.state_dict()["state"][0])):
        for name, tensor in tensors.items():
            whole[f"{prefix}.{name}"] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if torch.distributed.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
    return sorted(whole)
