"""What four ranks save under ZeRO and load elsewhere: plain, on other ranks, with masters, under tensor parallelism."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel as Colwise
from torch.distributed.tensor.parallel import RowwiseParallel as Rowwise
from torch.distributed.tensor.parallel import parallelize_module

import vescale_ckpt as vc
from tests.train.ddp import gpt
from tests.train.optim.zero_world import MAX_NORM, is_same, largest_difference, reference, train, wrap
from vescale_ckpt.errors import MismatchError, RankFailureError
from vescale_train.comm import units_of
from vescale_train.ddp import DistributedDataParallel
from vescale_train.optim import DistributedOptimizer


def alone(folder: str, run: str) -> vc.Checkpointer:
    """Return a checkpointer of this rank by itself; every rank is handed its own run."""
    return vc.Checkpointer(vc.open_store(Path(folder) / f"rank{dist.get_rank()}"), run, process_group=GROUPS["alone"])


def together(folder: str, run: str) -> vc.Checkpointer:
    return vc.Checkpointer(vc.open_store(Path(folder) / "together"), run)


GROUPS: dict[str, dist.ProcessGroup] = {}


def make_groups() -> None:
    for rank in range(dist.get_world_size()):
        group = dist.new_group([rank])
        if rank == dist.get_rank():
            GROUPS["alone"] = group


def state_bits(model, optimizer) -> dict[str, torch.Tensor]:
    """Return every value of a plain optimizer's state and every parameter by name."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def same_bits(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def plain_after(steps: int):
    model, optimizer = reference(steps)
    return state_bits(model, optimizer)


def resume(folder: str) -> dict:
    make_groups()
    return {
        "zero to plain": zero_to_plain(folder),
        "plain to zero": plain_to_zero(folder),
        "other ranks": other_ranks(folder),
        "refused": refused(folder),
        "masters": masters(folder),
        "tensor parallel": tensor_parallel(folder),
        "state dict": by_state_dict(),
    }


def zero_to_plain(folder: str) -> dict:
    """Save ZeRO-2 of four ranks; load it on one rank into plain AdamW, stepped before and not, and go on."""
    ddp, zero = wrap(4, 2, exact=True, overlap=True)
    train(ddp, zero, range(2))
    found = {"no state of its own before": len(zero.state) > 0}
    with together(folder, "zero") as ckpt:
        ckpt.save(2, {"model": ddp, "optimizer": zero})
        names = set(ckpt.store["zero@2"].tensors())
    found["unused has no state"] = not any("unused" in name for name in names if name.startswith("optimizer"))
    for stepped in (False, True):
        model = gpt.make()
        optimizer = gpt.adamw(model)
        if stepped:
            gpt.one_device_step(model, optimizer, 77, MAX_NORM)
        with vc.Checkpointer(vc.open_store(Path(folder) / "together"), "zero", process_group=GROUPS["alone"]) as ckpt:
            ckpt.load({"model": model, "optimizer": optimizer}, 2)
        found[f"loaded, stepped before: {stepped}"] = same_bits(state_bits(model, optimizer), plain_after(2))
        gpt.one_device_step(model, optimizer, 2, MAX_NORM)
        found[f"goes on, stepped before: {stepped}"] = same_bits(state_bits(model, optimizer), plain_after(3))
    return found


def plain_to_zero(folder: str) -> dict:
    """Save plain AdamW on each rank alone; load it into ZeRO of two and four ranks, and go on."""
    found = {}
    model, optimizer = reference(2)
    if dist.get_rank() == 0:
        with vc.Checkpointer(vc.open_store(Path(folder) / "plain"), "plain", process_group=GROUPS["alone"]) as ckpt:
            ckpt.save(2, {"model": model, "optimizer": optimizer})
    dist.barrier()
    for num_ranks, stage, stepped in ((4, 1, False), (2, 2, True), (2, 0, False)):
        ddp, zero = wrap(num_ranks, stage, exact=True)
        if stepped:
            train(ddp, zero, [77])
        with vc.Checkpointer(vc.open_store(Path(folder) / "plain"), "plain") as ckpt:
            ckpt.load({"model": ddp.module, "optimizer": zero}, 2)
        train(ddp, zero, [2])
        found[f"{num_ranks} ranks, ZeRO {stage}"] = is_same(ddp.module, reference(3)[0])
    return found


def other_ranks(folder: str) -> bool:
    """Load what ZeRO-2 of four ranks saved into ZeRO-1 of two, and go on."""
    ddp, zero = wrap(2, 1, exact=True)
    with together(folder, "zero") as ckpt:
        ckpt.load({"model": ddp.module, "optimizer": zero}, 2)
    train(ddp, zero, [2])
    return is_same(ddp.module, reference(3)[0])


def bare() -> DistributedDataParallel:
    return DistributedDataParallel(gpt.make(), use_distributed_optimizer=True, bucket_size=500)


def refused(folder: str) -> dict:
    """Load what AdamW saved into SGD, into other groups, and what SGD saved into AdamW: nothing is touched."""
    found = {}
    ddp = bare()
    sgd = DistributedOptimizer(torch.optim.SGD(gpt.groups(ddp.module), lr=0.1, momentum=0.9), ddp)
    train(ddp, sgd, [0])
    before = [p.detach().clone() for p in ddp.module.parameters()]
    with together(folder, "sgd") as ckpt:
        ckpt.save(0, {"model": ddp.module, "optimizer": sgd})
    with together(folder, "zero") as ckpt:
        found["adam into sgd"] = message_of(lambda: ckpt.load({"model": ddp.module, "optimizer": sgd}, 2))
    found["untouched"] = all(torch.equal(a, b) for a, b in zip(before, ddp.module.parameters(), strict=True))
    ddp, adam = wrap(4, 1)
    with together(folder, "sgd") as ckpt:
        found["sgd into adam"] = message_of(lambda: ckpt.load({"model": ddp.module, "optimizer": adam}, 0))
    ddp = bare()
    one_group = DistributedOptimizer(torch.optim.AdamW(ddp.module.parameters()), ddp)
    with together(folder, "zero") as ckpt:
        found["one group for two"] = message_of(lambda: ckpt.load({"model": ddp.module, "optimizer": one_group}, 2))
    return found


def message_of(call) -> str:
    try:
        call()
    except (MismatchError, RankFailureError) as error:
        return str(error)
    return "not refused"


def masters(folder: str) -> dict:
    """Train bfloat16 with float32 masters on four ranks, save, go on; the same from there on two and one."""
    ddp, zero = wrap(4, 2, exact=True, dtype=torch.bfloat16)
    train(ddp, zero, range(2))
    with together(folder, "masters") as ckpt:
        ckpt.save(2, {"model": ddp.module, "optimizer": zero})
    train(ddp, zero, [2, 3])
    found = {"trains": float(ddp.module.place.float().sub(gpt.make(torch.bfloat16).place.float()).abs().max()) > 0}
    for num_ranks in (2, 1):
        other, optimizer = wrap(num_ranks, 1, exact=True, dtype=torch.bfloat16)
        with together(folder, "masters") as ckpt:
            ckpt.load({"model": other.module, "optimizer": optimizer}, 2)
        train(other, optimizer, [2, 3])
        found[f"{num_ranks} ranks"] = is_same(other.module, ddp.module)
    with torch.no_grad():
        other.module.place.zero_()  # written by somebody else: the master follows
    before = other.module.norm.weight.detach().clone()
    train(other, optimizer, [4])
    found["written"] = float(other.module.place.float().abs().max()) < 0.05
    found["the rest goes on"] = not torch.equal(before, other.module.norm.weight)
    return found


def tensor_parallel_wrap(steps: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = gpt.make()
    plan = {f"blocks.{i}.{name}": style() for i in (0, 1) for name, style in (("up", Colwise), ("down", Rowwise))}
    parallelize_module(model, mesh["tp"], plan)
    ddp = DistributedDataParallel(model, mesh, use_distributed_optimizer=True, bucket_size=500)
    zero = DistributedOptimizer(gpt.adamw(model), ddp, clip_grad=MAX_NORM)
    for step in range(steps):
        mine = units_of(mesh.get_local_rank("dp"), 2, gpt.MICRO_BATCHES)
        for index in mine:
            with contextlib.nullcontext() if index == mine[-1] else ddp.no_sync():
                (gpt.loss_of(model, gpt.micro_batch(step, index)) / len(mine)).backward()
        zero.step()
        zero.zero_grad()
    return ddp, zero


def shards_of(zero) -> list[torch.Tensor]:
    """Return every piece of state on this rank."""
    return [
        piece.clone()
        for _, values in sorted(zero.state_dict()["state"].items())
        for value in values.values()
        for piece in ([p for _, p in value.pieces] if isinstance(value, vc.ShardedView) else [value])
    ]


def tensor_parallel(folder: str) -> dict:
    """Save dp=2 x tp=2; load it on one rank as plain AdamW, save that, and load it back."""
    ddp, zero = tensor_parallel_wrap(2)
    found = {"norm": abs(float(zero.grad_norm) - norm_of_step(1)) < 1e-5}
    with together(folder, "tp") as ckpt:
        ckpt.save(2, {"model": ddp.module, "optimizer": zero})
    model = gpt.make()
    optimizer = gpt.adamw(model)
    with vc.Checkpointer(vc.open_store(Path(folder) / "together"), "tp", process_group=GROUPS["alone"]) as ckpt:
        ckpt.load({"model": model, "optimizer": optimizer}, 2)
    found["as one device"] = largest_difference(model, reference(2)[0]) < 1e-6
    with alone(folder, "tp") as ckpt:
        ckpt.save(2, {"model": model, "optimizer": optimizer})
    other, back = tensor_parallel_wrap(1)
    dist.barrier()
    with vc.Checkpointer(vc.open_store(Path(folder) / "rank0"), "tp") as ckpt:
        ckpt.load({"model": other.module, "optimizer": back}, 2)
    pairs = zip(shards_of(zero), shards_of(back), strict=True)
    found["back to the bit"] = all(torch.equal(a, b) for a, b in pairs) and len(shards_of(zero)) > 20
    return found


def norm_of_step(number: int) -> float:
    model = gpt.make()
    optimizer = gpt.adamw(model)
    return [gpt.one_device_step(model, optimizer, step, MAX_NORM) for step in range(number + 1)][number]


def by_state_dict() -> dict:
    """Hand a plain optimizer's own ``state_dict`` over, which numbers parameters, and our own, which names them."""
    model, optimizer = reference(2)
    ddp, zero = wrap(4, 2, exact=True)
    ddp.load_state_dict(model.state_dict())
    zero.load_state_dict(optimizer.state_dict())
    other, again = wrap(4, 1, exact=True)
    other.load_state_dict(ddp.state_dict())
    again.load_state_dict(zero.state_dict())
    found = {}
    for name, one, its in (("by number", ddp, zero), ("by name", other, again)):
        train(one, its, [2])
        found[name] = is_same(one.module, reference(3)[0])
    return found
