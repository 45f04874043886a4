"""What four ranks do with ragged shards."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import vescale_ckpt as vc
from vescale_train.ragged import RaggedShard, balanced_units, distribute, from_local

SHAPE = (12, 6, 5)
RAGGED = [
    RaggedShard((0,), (1, 2, 0, 1)),
    RaggedShard((0,), (0, 0, 12, 0)),
    RaggedShard((0, 1), (5, 1, 1, 2)),
    RaggedShard((0, 1, 2), (100, 20, 0, 240)),
    RaggedShard((0, 1), balanced_units(72, 4, (2, 6))),
]
PLAIN = [Replicate(), Shard(0), Shard(1), Shard(2)]


def check(folder: str) -> dict:
    return {
        "one axis": one_axis(),
        "sums": sums(),
        "tensor parallel": tensor_parallel(),
        "backward": backward(),
        "operations": operations(),
        "training": training(),
        "checkpoints": checkpoints(folder),
        "refused": refused(),
    }


def tagged(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).to(dtype)


def equal(one: DTensor, other: DTensor) -> bool:
    return one.placements == other.placements and torch.equal(one.to_local(), other.to_local())


def reference(full: torch.Tensor, mesh, placements) -> torch.Tensor:
    """Return this rank's part by hand: torch's chunks on every axis but the ragged one, then rows of what is left."""
    local = full
    ragged = None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = list(local.chunk(mesh.size(axis), placement.dim))
            at = mesh.get_local_rank(axis)
            local = parts[at] if at < len(parts) else local.narrow(placement.dim, 0, 0)
        elif isinstance(placement, RaggedShard):
            ragged = (placement, mesh.get_local_rank(axis))
    if ragged is None:
        return local
    placement, at = ragged
    rows = local.flatten(0, len(placement.dims) - 1)
    each = len(rows) // sum(placement.local_units)
    start = sum(placement.local_units[:at]) * each
    return rows[start : start + placement.local_units[at] * each]


def one_axis() -> dict:
    """From every placement to every other on one axis, in several dtypes."""
    mesh = init_device_mesh("cpu", (4,))
    found = {}
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.bool)):
        full = tagged(*SHAPE, dtype=dtype) if dtype != torch.bool else tagged(*SHAPE) % 3 == 0
        pairs = list(itertools.product([*RAGGED, *PLAIN], repeat=2))
        for source, target in pairs if number == 0 else pairs[number::7]:
            begin = distribute(full, mesh, [source])
            end = begin.redistribute(mesh, [target])
            right = torch.equal(end.to_local(), reference(full, mesh, [target])) and end.shape == full.shape
            found[f"{dtype}: {source} to {target}"] = right and torch.equal(begin.full_tensor(), full)
    return found


def sums() -> dict:
    mesh = init_device_mesh("cpu", (4,))
    full = tagged(*SHAPE)
    mine = full * (dist.get_rank() + 1)
    found = {}
    for reduce_op, target in itertools.product(("sum", "avg"), RAGGED):
        made = DTensor.from_local(mine, mesh, [Partial(reduce_op)], run_check=False).redistribute(mesh, [target])
        expected = full * (10 if reduce_op == "sum" else 2.5)
        found[f"{reduce_op} to {target}"] = torch.equal(made.full_tensor(), expected)
    return found


def tensor_parallel() -> dict:
    """On two axes: what changes one, what changes both, on the same dim and on others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = tagged(*SHAPE)
    layouts = [
        (RaggedShard((0,), (1, 2)), Shard(0)),
        (RaggedShard((0, 1), (5, 1)), Shard(1)),
        (RaggedShard((0,), (0, 1)), Shard(2)),
        (RaggedShard((0,), (1, 3)), Replicate()),
        (Shard(0), RaggedShard((0,), (1, 2))),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Replicate(), Replicate()),
    ]
    found = {}
    for source, target in itertools.product(layouts, repeat=2):
        begin = distribute(full, mesh, source)
        end = begin.redistribute(mesh, target)
        right = torch.equal(end.full_tensor(), full) and torch.equal(begin.full_tensor(), full)
        if any(isinstance(p, RaggedShard) for p in target):
            right = right and torch.equal(end.to_local(), reference(full, mesh, target))
        found[f"{source} to {target}"] = right
    return found


def backward() -> bool:
    """Gradients flow back into the ragged shard: a gather in forward is a reduce-scatter in backward."""
    mesh = init_device_mesh("cpu", (4,))
    placement = RaggedShard((0,), (1, 2, 0, 1))
    local = reference(tagged(8, 3), mesh, [placement]).clone()
    leaf = from_local(local, mesh, [placement], (8, 3)).requires_grad_()
    whole = leaf.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    (whole * (dist.get_rank() + 1)).pow(2).sum().backward()
    expected = 2 * tagged(8, 3) * (1 + 4 + 9 + 16)
    return leaf.grad.placements == (placement,) and torch.equal(leaf.grad.full_tensor(), expected)


def operations() -> dict:
    mesh = init_device_mesh("cpu", (4,))
    one = distribute(tagged(8, 3), mesh, [RaggedShard((0,), (1, 2, 0, 1))])
    other = distribute(tagged(8, 3), mesh, [RaggedShard((0,), (1, 1, 1, 1))])
    found = {"pointwise": torch.equal((one * 2 + one).sqrt().full_tensor(), (tagged(8, 3) * 3).sqrt())}
    found["like"] = torch.equal(torch.zeros_like(one).add_(1).full_tensor(), torch.ones(8, 3))
    calls = {
        "sum": one.sum,
        "product": lambda: one.t() @ one,
        "row": lambda: one[0],
        "reshape": lambda: one.reshape(-1),
        "norm": lambda: torch.linalg.vector_norm(one),
        "mixed": lambda: one + other,
    }
    for name, call in calls.items():
        try:
            call()
            found[name] = False
        except (RuntimeError, ValueError) as error:
            found[name] = "cannot run aten." in str(error) and "redistribute" in str(error)
    return found


def training() -> bool:
    """AdamW on ragged parameters has the bits of AdamW on whole ones."""
    mesh = init_device_mesh("cpu", (4,))
    plain = torch.nn.Parameter(tagged(8, 3) / 10)
    ragged = torch.nn.Parameter(distribute(tagged(8, 3) / 10, mesh, [RaggedShard((0, 1), (5, 0, 12, 7))]))
    optimizers = [torch.optim.AdamW([p], lr=0.1, foreach=False) for p in (plain, ragged)]
    for step in range(3):
        plain.grad = torch.sin(tagged(8, 3) + step)
        ragged.grad = distribute(plain.grad, mesh, ragged.placements)
        for optimizer in optimizers:
            optimizer.step()
    return torch.equal(ragged.full_tensor(), plain)


def checkpoints(folder: str) -> dict:
    """Save with ragged shards, load with others, with none, on two axes, and an optimizer's state with them."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = tagged(*SHAPE)
    layouts = [
        (line, [RaggedShard((0,), (1, 2, 0, 1))]),
        (grid, [RaggedShard((0,), (1, 2)), Shard(0)]),
        (grid, [RaggedShard((0, 1), (5, 1)), Shard(2)]),
        (line, [Shard(0)]),
        (line, [Replicate()]),
    ]
    found = {}
    with vc.Checkpointer(vc.open_store(Path(folder) / "store"), "run") as ckpt:
        for step, (mesh, placements) in enumerate(layouts):
            ckpt.save(step, {"w": distribute(full, mesh, placements)})
        for step, (mesh, placements) in itertools.product(range(len(layouts)), layouts):
            target = distribute(torch.zeros(SHAPE), mesh, placements)
            ckpt.load({"w": target}, step)
            found[f"{step} to {placements}"] = torch.equal(target.full_tensor(), full)
        found["optimizer"] = optimizer_state(ckpt, line)
    return found


def holder(tensor: torch.Tensor) -> torch.nn.ParameterDict:
    return torch.nn.ParameterDict({"w": torch.nn.Parameter(tensor)})


def optimizer_state(ckpt: vc.Checkpointer, mesh) -> bool:
    model = torch.nn.ParameterDict(
        {"w": torch.nn.Parameter(distribute(tagged(8, 3), mesh, [RaggedShard((0,), (3, 0, 4, 1))]))}
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model["w"].grad = torch.ones_like(model["w"]) * 2
    optimizer.step()
    ckpt.save(50, {"model": model, "optimizer": optimizer})
    plain = holder(torch.zeros(8, 3))
    other = torch.optim.AdamW(plain.parameters())
    ckpt.load({"model": plain, "optimizer": other}, 50)
    twin = torch.nn.ParameterDict(
        {"w": torch.nn.Parameter(distribute(torch.zeros(8, 3), mesh, [RaggedShard((0,), (1, 5, 1, 1))]))}
    )
    third = torch.optim.AdamW(twin.parameters(), foreach=False)
    ckpt.load({"model": twin, "optimizer": third}, 50)
    moments = [o.state[m["w"]]["exp_avg"] for o, m in ((optimizer, model), (third, twin))]
    whole = [moment.full_tensor() for moment in moments] + [other.state[plain["w"]]["exp_avg"]]
    return all(torch.equal(one, whole[0]) for one in whole) and torch.equal(twin["w"].full_tensor(), plain["w"])


def refused() -> dict:
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = tagged(*SHAPE)
    calls = {
        "5 units do not divide": lambda: distribute(full, line, [RaggedShard((0,), (1, 1, 1, 2))]),
        "is for 2 ranks, the axis has 4": lambda: distribute(full, line, [RaggedShard((0,), (1, 1))]),
        "one ragged axis at most": lambda: distribute(full, grid, [RaggedShard((0,), (1, 1))] * 2),
        "a local tensor of shape (3, 6, 5)": lambda: from_local(
            torch.zeros(2, 6, 5), line, [RaggedShard((0,), (1, 1, 1, 1))], SHAPE
        ),
        "only sums and means": lambda: DTensor.from_local(full, line, [Partial("max")], run_check=False).redistribute(
            line, [RaggedShard((0,), (1, 1, 1, 1))]
        ),
    }
    found = {}
    for message, call in calls.items():
        try:
            call()
            found[message] = "not refused"
        except ValueError as error:
            found[message] = True if message in str(error) or "units do not divide" in str(error) else str(error)
    found["torch's own go on"] = torch.equal(distribute_tensor(full, line, [Shard(0)]).full_tensor(), full)
    return found
