"""What the ranks of the layout matrix do: save on every layout, and load all that on every layout, in another world."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vescale_ckpt as vc

SHAPES = {
    "large": ((1030, 770), torch.float32),
    "half": ((640, 512), torch.bfloat16),
    "whole": ((64, 9), torch.int64),
    "odd": ((7, 5), torch.float32),
    "fewer rows than ranks": ((3, 300), torch.float32),
    "one row": ((1, 17), torch.float32),
    "line": ((1025,), torch.float64),
    "three": ((3,), torch.float32),
    "scalar": ((), torch.float32),
}
TENSOR_LAYOUTS = {
    "one": ((1,), (Replicate(),)),
    "rows x 2": ((2,), (Shard(0),)),
    "rows x 4": ((4,), (Shard(0),)),
    "columns x 4": ((4,), (Shard(1),)),
    "columns x 3": ((3,), (Shard(1),)),
    "grid 2 x 2": ((2, 2), (Shard(0), Shard(1))),
    "rows twice 2 x 2": ((2, 2), (Shard(0), Shard(0))),
    "copies x 2": ((2,), (Replicate(),)),
    "copied rows 2 x 2": ((2, 2), (Replicate(), Shard(0))),
}


@functools.cache
def tagged(name: str) -> torch.Tensor:
    """Return a tensor whose every element differs from its neighbours, whatever the seed; not to be filled."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    if dtype is torch.int64:
        return torch.randint(-(2**62), 2**62, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@functools.cache
def copied() -> torch.Tensor:
    """Return a plain tensor that every rank holds."""
    return tagged("half") + 1


NUM_BYTES = sum(tagged(name).nbytes for name in SHAPES) + copied().nbytes


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements) -> DTensor:
    """Return a tensor on a mesh; cuts of dims that it has not are cuts of its last, and scalars are copied."""

    def fit(placement):
        if not tensor.ndim:
            return Replicate()
        return Shard(min(placement.dim, tensor.ndim - 1)) if isinstance(placement, Shard) else placement

    return distribute_tensor(tensor, mesh, [fit(placement) for placement in placements])


@dataclass
class Place:
    """A layout that this process may be a part of."""

    name: str
    size: int
    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    placements: tuple

    @property
    def here(self) -> bool:
        return dist.get_rank() < self.size

    def checkpointer(self, store: vc.Store, run: str) -> vc.Checkpointer:
        everybody = self.size == dist.get_world_size()
        options = vc.SaveOptions(deadline_seconds=60.0)
        return vc.Checkpointer(store, run, process_group=None if everybody else self.group, options=options)

    def state(self, *, fill: bool) -> dict:
        """Return the tensors here, right ones or ones full of something else."""
        tensors = {}
        for name in SHAPES:
            full = tagged(name)
            full = full if fill else torch.full_like(full, 7)
            tensors[name] = full if self.name == "one" else placed(full, self.mesh, self.placements)
        return {"t": tensors, "copied": copied() if fill else torch.zeros_like(copied()), "lr": 0.5}


def places() -> list[Place]:
    """Return all layouts; a collective over all ranks."""
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)} | {4: dist.group.WORLD}
    found = []
    for name, (shape, placements) in TENSOR_LAYOUTS.items():
        size = torch.Size(shape).numel()
        mesh = DeviceMesh("cpu", torch.arange(size).reshape(shape)) if size > 1 else None
        found.append(Place(name, size, groups[size], mesh, placements))
    return found


def sum_over(group: dist.ProcessGroup, *values: int) -> list[int]:
    total = torch.tensor(values)
    dist.all_reduce(total, group=group)
    return total.tolist()


# ---- models


class Net(nn.Module):
    """Linear layers for tensor parallelism, and parameters whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 192)
        self.up = nn.Linear(192, 768)
        self.down = nn.Linear(768, 192)
        self.norm = nn.LayerNorm(192)
        self.head = nn.Linear(192, 37, bias=False)
        self.few = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(self.norm(hidden)) * self.few.sum()


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Return the mesh of all ranks of a shape, made once."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


def plain(model):
    return model


def fsdp(model):
    mesh = mesh_of(4)
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hsdp(model):
    mesh = mesh_of(2, 2)
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model, mesh=None):
    mesh = mesh or mesh_of(4)
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp_on_tensor_parallel(model):
    """Shard rows over two ranks of what two others have cut by rows (up) or columns (down): strided shards."""
    mesh = mesh_of(2, 2)
    tensor_parallel(model, mesh["inner"])
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh["outer"])
    return model


MODELS = {
    "model one": plain,
    "model fsdp x 4": fsdp,
    "model hsdp 2 x 2": hsdp,
    "model tp x 4": tensor_parallel,
    "model fsdp x tp 2 x 2": fsdp_on_tensor_parallel,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def contents(state: dict) -> dict[str, torch.Tensor]:
    """Return every parameter, buffer and moment, whole."""
    found = {name: whole(tensor) for name, tensor in state["model"].state_dict().items()}
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state[parameter].items():
            found[f"{name}/{key}"] = whole(value)
    return found


def make_model(layout, seed: int, *, steps: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return a model with its optimizer, and the parameters as they were before anything cut them.

    With a rate of 0 steps fill the moments and leave the parameters as they are, to the bit.
    """
    torch.manual_seed(seed)
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    model = layout(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
    for step in range(steps):
        torch.manual_seed(seed + step)
        model(torch.randint(0, 101, (4, 5))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "trained": steps}, before


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], what: str) -> None:
    assert one.keys() == other.keys(), (what, one.keys() ^ other.keys())
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, (what, name)
        assert torch.equal(tensor, other[name]), (what, name)


# ---- the two worlds


def save_all(folder: str) -> list[str]:
    """Save every layout as a run of its own; return the runs."""
    store = vc.open_store(Path(folder) / "store")
    runs = []
    for place in places():
        runs.append(place.name)
        if not place.here:
            continue
        with place.checkpointer(store, place.name) as checkpointer:
            state = place.state(fill=True) | {"rank": vc.PerRank(dist.get_rank())}
            report = checkpointer.save(1, state).result()
            total, largest = sum_over(place.group, report.bytes_total)[0], report.imbalance
            assert total == NUM_BYTES, (place.name, total)
            assert largest <= 1.35, (place.name, largest)
    for name, layout in MODELS.items():
        runs.append(name)
        if layout is plain and dist.get_rank():
            continue
        state, before = make_model(layout, 1, steps=2)
        found = contents(state)
        same({n: t for n, t in found.items() if n in before}, before, name)
        assert all(found[f"{n}/exp_avg"].abs().sum() > 0 for n in before)
        group = places_of_one() if layout is plain else None
        with vc.Checkpointer(store, name, process_group=group) as checkpointer:
            checkpointer.save(1, state)
        if dist.get_rank() == 0:
            torch.save(found, Path(folder) / f"{name}.pt")
    return runs


@functools.cache
def places_of_one() -> dist.ProcessGroup:
    """Return the group of rank 0 alone."""
    return dist.new_group([0], use_local_synchronization=True)


def load_all(folder: str) -> list[list]:
    """Load every run on every layout of its kind; return (saved, loaded, bytes read by all, bytes of all)."""
    store = vc.open_store(Path(folder) / "store", create=False)
    torch.manual_seed(1234)
    return load_tensors(store) + load_models(store, Path(folder))


def load_tensors(store: vc.Store) -> list[list]:
    rows = []
    for place in places():
        if not place.here:
            continue
        expected = place.state(fill=True)
        for run in TENSOR_LAYOUTS:
            with place.checkpointer(store, run) as checkpointer:
                state = place.state(fill=False) | {"rank": vc.PerRank(None), "lr": 0.0}
                report = checkpointer.load(state, ignore=() if SIZES[run] == place.size else ("rank",))
            for name, tensor in state["t"].items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                right = expected["t"][name]
                right = right.to_local() if isinstance(right, DTensor) else right
                assert torch.equal(local, right), (run, place.name, name)
            assert torch.equal(state["copied"], copied()), (run, place.name)
            assert state["lr"] == 0.5
            assert state["rank"].value == (dist.get_rank() if SIZES[run] == place.size else None)
            read, overhead = sum_over(place.group, report.bytes_read, report.bytes_overhead)
            if dist.get_rank() == 0:
                rows.append([run, place.name, read, NUM_BYTES, overhead])
    return rows


SIZES = {name: torch.Size(shape).numel() for name, (shape, _) in TENSOR_LAYOUTS.items()}


def load_models(store: vc.Store, folder: Path) -> list[list]:
    rows = []
    for name, layout in MODELS.items():
        if layout is plain and dist.get_rank():
            continue
        group = places_of_one() if layout is plain else None
        for run in MODELS:
            expected = torch.load(folder / f"{run}.pt", weights_only=True)
            state, before = make_model(layout, 99, steps=0)
            with vc.Checkpointer(store, run, process_group=group) as checkpointer:
                report = checkpointer.load(state)
            found = contents(state)
            same(found, expected, f"{run} on {name}")
            assert not torch.equal(found["up.weight"], before["up.weight"])
            assert state["trained"] == 2
            read, overhead = sum_over(group or dist.group.WORLD, report.bytes_read, report.bytes_overhead)
            if dist.get_rank() == 0:
                rows.append([run, name, read, sum(t.nbytes for t in expected.values()), overhead])
    return rows
