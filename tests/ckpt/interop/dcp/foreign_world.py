"""Ranks that save with torch's own DCP what is read back without torch's reader."""

from __future__ import annotations

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale_ckpt.errors import MismatchError
from vescale_ckpt.interop.foreign.detect import open_foreign
from vescale_ckpt.interop.foreign.load import load_foreign


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
    torch.distributed.barrier()
    load(folder, flat, {name: tensor for name, tensor in whole.items() if name.startswith("model.")})
    return sorted(whole)


def load(folder: str, flat, whole: dict[str, torch.Tensor]) -> None:
    """Load the folder onto other layouts than those that saved it."""
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    fully_shard(model, mesh=flat)
    columns = distribute_tensor(torch.zeros(7, 5), flat, [Shard(1)])
    with open_foreign(f"{folder}/dcp") as snapshot:
        load_foreign(snapshot, {"model": model, "rows": columns}, only=("model", "rows"))
    assert torch.equal(columns.full_tensor(), tagged(7, 5))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), whole[f"model.{name}"]), name
    with open_foreign(f"{folder}/dcp") as snapshot:
        try:
            load_foreign(snapshot, {"rows": torch.zeros(3)}, only=("rows",))
        except MismatchError:
            return
    raise AssertionError("a target of another shape was loaded")
