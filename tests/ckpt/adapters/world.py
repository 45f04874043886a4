"""One rank of a real process group: captures a trained state on one layout and restores it on others.

Run as ``world.py RANK WORLD_SIZE PORT SCENARIO...``; test_worlds.py starts the ranks.
"""

from __future__ import annotations

import datetime as dt
import os
import sys

import memory_store
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.adapters.restore import unexpected_keys
from vescale_ckpt.state.leaf import Holding
from vescale_ckpt.state.per_rank import PerRank


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a tie and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.few = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(self.norm(hidden)) * self.few.sum()


class Split(nn.Module):
    """Even sizes, so that FSDP2 can stand on tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def plain(model):
    return model


def fsdp(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp_kept_gathered(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def hsdp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp_on_tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(model, mesh["tp"])
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model.down, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def make(cls, layout, *, seed, steps):
    torch.manual_seed(seed)
    model = layout(cls())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    # a foreach step does not mix the meshes of tensor-parallel and of other parameters
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], foreach=False)
    for step in range(steps):
        torch.manual_seed(step)
        data = torch.randint(0, 11, (4, 5)) if cls is Net else torch.randn(4, 6)
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "rank": PerRank(torch.tensor([dist.get_rank(), seed]))}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def contents(state):
    model = state["model"].module if isinstance(state["model"], nn.parallel.DistributedDataParallel) else state["model"]
    found = {name: whole(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, p in model.named_parameters():
        for key, value in state["optimizer"].state.get(p, {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def gathered(captured):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, captured)
    return memory_store.store(dict(enumerate(every)))


def load_everywhere(stored, state, **more):
    rank, world = dist.get_rank(), dist.get_world_size()
    restore = memory_store.load(stored, state, rank=rank, world_size=world, **more)
    flags = [None] * world
    dist.all_gather_object(flags, restore.taken)
    assert unexpected_keys(stored.tree, np.logical_or.reduce(flags), RestoreOptions()) == ()
    return restore


def same(one, other):
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def check_pair(cls, source, target):
    """Save on one layout, restore on another, into an optimizer that never stepped and into one that did."""
    saved = make(cls, source, seed=1, steps=2)
    expected = contents(saved)
    stored = gathered(capture(saved, rank=dist.get_rank()))
    for path, copies in stored.copies.items():
        if stored.tensors[path].alias_of is None:
            assert (copies > 0).all(), f"{path} is not covered"
    for name, value in expected.items():
        path = ("optimizer", "state", *name.split("/")) if "/" in name else ("model", name)
        root = stored.tensors[path].alias_of
        full = stored.full[path if root is None else tuple(stored.tensors)[root]]
        assert torch.equal(full, value), name
    for steps in (0, 1):
        state = make(cls, target, seed=2, steps=steps)
        load_everywhere(stored, state)
        same(contents(state), expected)
        assert state["rank"].value.tolist() == [dist.get_rank(), 1]
        assert state["optimizer"].param_groups[1]["weight_decay"] == 0.0
        again = gathered(capture(state, rank=dist.get_rank()))
        assert again.tensors.keys() == stored.tensors.keys()


def scenario_net():
    two = [(ddp, fsdp), (fsdp, plain), (plain, tensor_parallel)]
    four = [(fsdp, tensor_parallel), (tensor_parallel, hsdp), (hsdp, fsdp_kept_gathered), (fsdp_kept_gathered, plain)]
    for source, target in two if dist.get_world_size() == 2 else four:
        check_pair(Net, source, target)


def scenario_split():
    for source, target in [
        (fsdp_on_tensor_parallel, fsdp),
        (hsdp, fsdp_on_tensor_parallel),
    ]:
        check_pair(Split, source, target)


def scenario_ties():
    """A tie is told by every rank that holds some of the tensor, and by no rank told wrongly."""
    state = make(Net, fsdp, seed=1, steps=0)
    captured = capture(state, rank=dist.get_rank())
    aliases = {leaf.path: leaf.alias_of for leaf in captured.leaves if leaf.alias_of}
    assert aliases == {("model", "head.weight"): ("model", "embed.weight")}
    few = next(leaf for leaf in captured.leaves if leaf.path == ("model", "few"))
    assert len(few.pieces) == (dist.get_rank() < 3)
    target = make(Net, fsdp, seed=2, steps=0)
    load_everywhere(gathered(captured), target)
    assert target["model"].head.weight is target["model"].embed.weight


def scenario_submesh():
    """Ranks outside the mesh hold nothing, and load nothing."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(30.0).reshape(10, 3)
    half = DeviceMesh("cpu", [0, 1])
    state = {
        "half": distribute_tensor(full, half, [Shard(0)]),
        "grid": distribute_tensor(full, mesh, [Shard(1), Shard(0)]),
        "same_dim": distribute_tensor(full, mesh, [Shard(0), Shard(0)]),
        "copies": distribute_tensor(full, mesh, [Replicate(), Replicate()]),
    }
    captured = capture(state, rank=rank)
    leaves = {leaf.path[0]: leaf for leaf in captured.leaves}
    assert len(leaves["half"].pieces) == (rank < 2)
    assert leaves["copies"].holding is Holding.REPLICATED
    assert leaves["grid"].holding is Holding.SHARDED
    stored = gathered(captured)
    for name in state:
        assert torch.equal(stored.full[name,], full), name
    for source in state:
        target = {key: distribute_tensor(torch.zeros(10, 3), t.device_mesh, t.placements) for key, t in state.items()}
        options = RestoreOptions(rename=dict.fromkeys(state, source), only=tuple(state))
        memory_store.load(stored, target, rank=rank, world_size=4, options=options)
        for key, tensor in target.items():
            assert torch.equal(whole(tensor), full) or (key == "half" and rank >= 2), (source, key)


def scenario_partial():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"'w'.*redistribute"):
        capture({"w": pending}, rank=dist.get_rank())


def scenario_frozen():
    """Frozen weights have their full content, though a forward alone leaves some gathered and some released."""
    torch.manual_seed(0)
    model = Split()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.up.requires_grad_(False)
    for kept in (True, False):
        torch.manual_seed(0)
        model = Split()
        model.up.requires_grad_(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.up, mesh=mesh, reshard_after_forward=kept)
        fully_shard(model, mesh=mesh, reshard_after_forward=kept)
        with torch.no_grad():
            model(torch.ones(2, 6))
        stored = gathered(capture({"model": model}, rank=dist.get_rank()))
        for name, value in expected.items():
            assert torch.equal(stored.full["model", name], value), name


def scenario_adapters():
    """Every rank's slice of an adapter is its own; two optimizers over one model keep their states apart."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def make_state(value):
        base = nn.Linear(4, 4)
        base.a = nn.Parameter(DTensor.from_local(torch.full((1, 4), value), mesh, [Shard(0)], run_check=False))
        base.b = nn.Parameter(DTensor.from_local(torch.full((4, 1), value), mesh, [Shard(1)], run_check=False))
        first = torch.optim.AdamW([base.a], lr=0.1, foreach=False)
        second = torch.optim.SGD([base.b], lr=0.2, momentum=0.9, foreach=False)
        return {"model": base, "first": first, "second": second}

    saved = make_state(1.0 + rank)
    for p in (saved["model"].a, saved["model"].b):
        p.grad = p.detach() * 2
    saved["first"].step()
    saved["second"].step()
    adapters = {key: saved[key] for key in ("first", "second")} | {"model": saved["model"]}
    stored = gathered(capture(adapters, rank=rank))
    target = make_state(0.0)
    load_everywhere(stored, target)
    model, source = target["model"], saved["model"]
    assert torch.equal(model.a.to_local(), source.a.to_local())
    assert torch.equal(model.b.to_local(), source.b.to_local())
    assert target["first"].state[model.a].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert target["second"].state[model.b].keys() == {"momentum_buffer"}
    buffer = target["second"].state[model.b]["momentum_buffer"]
    assert torch.equal(buffer.to_local(), torch.full((4, 1), 2.0 + 2 * rank))


class Stage(nn.Module):
    """A part of a stack of layers under their global names."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in layers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def scenario_pipeline():
    """Stages hold different names; the checkpoint holds all of them, and another split takes its part."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def stage(layers, seed, steps):
        torch.manual_seed(seed + rank)
        model = Stage(layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        for _ in range(steps):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    stored = gathered(capture(stage(range(2 * rank, 2 * rank + 2), 1, 2), rank=rank))
    assert len([path for path in stored.tensors if path[0] == "model"]) == 4 * world
    target = stage(range(rank, 2 * world, world), 2, 0)
    load_everywhere(stored, target)
    for name, p in target["model"].named_parameters():
        assert torch.equal(p, stored.full["model", name])
        assert torch.equal(target["optimizer"].state[p]["exp_avg"], stored.full["optimizer", "state", name, "exp_avg"])
    assert target["optimizer"].param_groups[0]["lr"] == 0.1
    whole_model = stage(range(2 * world), 3, 0)
    load_everywhere(stored, whole_model)
    if world > 1:
        lost = stage(range(2), 3, 0)
        restore = memory_store.plan(stored, lost, rank=rank, world_size=world)
        lines = unexpected_keys(stored.tree, restore.taken, RestoreOptions())
        assert any("layers.2" in line for line in lines), lines


def main():
    rank, world, port, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world), timeout=dt.timedelta(seconds=60))
    for scenario in scenarios:
        globals()[f"scenario_{scenario}"]()
        print("passed", scenario, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
