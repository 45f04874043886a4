"""What four ranks do with fully sharded models, norms over several meshes, and matrices with one owner."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vescale_ckpt as vc
from tests.train.ddp import gpt
from vescale_train.ddp import DDPOptions, DistributedDataParallel
from vescale_train.errors import ConfigError, InvalidInputError
from vescale_train.optim import (
    BasicOptimizer,
    DistributedOptimizer,
    MuonByOwner,
    clip_grad_norm,
    fully_shard_policy,
    optimizer,
)

STEPS, MAX_NORM = 3, 0.5


def check(folder: str) -> dict:
    return {
        "fully sharded": fully_sharded(folder),
        "norms": norms(),
        "stages": stages(),
        "muon": muon(folder),
        "chosen": chosen(),
    }


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    pairs = list(zip(map(whole, model.parameters()), other.parameters(), strict=True))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def fully_sharded(folder: str) -> dict:
    """Train over dp and over dp x fsdp, each rank on its own micro-batch; save one and go on as one device."""
    one = gpt.make()
    plain = gpt.adamw(one)
    for step in range(STEPS):
        gpt.one_device_step(one, plain, step, MAX_NORM)
    found = {}
    for shape, names in (((4,), ("dp",)), ((2, 2), ("dp", "fsdp"))):
        model = fully_shard_policy(gpt.make(), init_device_mesh("cpu", shape, mesh_dim_names=names))
        basic = BasicOptimizer(gpt.adamw(model), model, clip_grad=MAX_NORM)
        for step in range(STEPS):
            gpt.loss_of(model, gpt.micro_batch(step, dist.get_rank())).backward()
            basic.step()
            basic.zero_grad()
        key = " x ".join(names)
        found[key] = largest_difference(model, one) < 1e-6
        with vc.Checkpointer(vc.open_store(Path(folder) / key), "run") as ckpt:
            ckpt.save(0, {"model": model, "optimizer": basic})
            ddp = DistributedDataParallel(gpt.make(), bucket_size=500, use_distributed_optimizer=True)
            zero = DistributedOptimizer(gpt.adamw(ddp.module), ddp)
            ckpt.load({"model": ddp, "optimizer": zero}, 0)
        found[f"{key} to ZeRO"] = all(
            torch.equal(whole(a), b) for a, b in zip(model.parameters(), ddp.module.parameters(), strict=True)
        )
    try:
        fully_shard_policy(gpt.make(), init_device_mesh("cpu", (4,)), blocks=["head"])
    except ConfigError as error:
        found["ties"] = "they are one parameter, in 'no block' and in 'head'" in str(error)
    return found


def norms() -> dict:
    """Gradients that are plain, replicated, cut over one mesh, over another and over both, cut unevenly."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    layouts = [
        None,
        (grid["tp"], [Shard(0)]),
        (grid["tp"], [Replicate()]),
        (grid["dp"], [Shard(1)]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Replicate(), Shard(0)]),
        (line, [Shard(0)]),
    ]
    torch.manual_seed(5)
    gradients = [torch.randn(5, 3) * 10 for _ in layouts]
    found = {}
    for norm_type in (2.0, 1.0, math.inf):
        plain = nn.ParameterList([nn.Parameter(torch.zeros(5, 3)) for _ in layouts])
        spread = nn.ParameterList()
        for layout, gradient, parameter in zip(layouts, gradients, plain, strict=True):
            parameter.grad = gradient.clone()
            cut = [torch.zeros(5, 3), gradient.clone()]
            if layout is not None:
                cut = [distribute_tensor(tensor, *layout) for tensor in cut]
            spread.append(nn.Parameter(cut[0]))
            spread[-1].grad = cut[1]
        spread.tied = spread[0]
        for exact in (False, True) if norm_type == 2.0 else (False,):
            measured = clip_grad_norm(spread, math.inf, norm_type=norm_type, exact=exact)
            expected = torch.nn.utils.get_total_norm([p.grad for p in plain], norm_type)
            found[f"norm {norm_type}, exact {exact}"] = torch.allclose(measured, expected, rtol=1e-6)
        clip_grad_norm(spread, 1.0, norm_type=norm_type)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
        found[f"clipped {norm_type}"] = all(
            torch.allclose(whole(a.grad), b.grad, rtol=1e-5) for a, b in zip(spread, plain, strict=True)
        )
    pending = nn.ParameterList([nn.Parameter(distribute_tensor(torch.zeros(2), line, [Replicate()]))])
    pending[0].grad = DTensor.from_local(torch.ones(2), line, [Partial()])
    try:
        clip_grad_norm(pending, 1.0)
    except InvalidInputError as error:
        found["a sum still to be made"] = "'0': it is a sum still to be made" in str(error)
    return found


def stages() -> dict:
    """Two stages on two ranks each; what both have counts once; names decide the order, not the stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(6)
    gradients = {name: torch.randn(7) for name in ("a", "b", "c", "shared")}
    names = [["b", "shared"], ["a", "c", "shared"]][stage]
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(7)) for name in names})
    for name in names:
        model[name].grad = gradients[name].clone()
    expected = torch.nn.utils.get_total_norm(list(gradients.values()))
    elsewhere = ["shared"] if stage else []
    one = nn.ParameterDict({name: nn.Parameter(torch.zeros(7)) for name in gradients})
    for name, gradient in gradients.items():
        one[name].grad = gradient
    found = {}
    for exact in (False, True):
        norm = clip_grad_norm(
            model, math.inf, pipeline_group=mesh.get_group("pp"), counted_elsewhere=elsewhere, exact=exact
        )
        found[f"exact {exact}"] = torch.allclose(norm, expected, rtol=1e-6)
    found["bits"] = torch.equal(norm, clip_grad_norm(one, math.inf, exact=True))
    return found


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList([nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)])
        self.out = nn.Linear(6, 10, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def make_muon(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.Muon([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}], lr=0.02)


def muon_step(model: nn.Module, step: int, index: int, num_units: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + index))
    return model(x).pow(2).mean() / num_units


def muon(folder: str) -> dict:
    """Train with one owner a matrix on 1, 2 and 4 ranks, and with tensor parallelism, beside torch's own Muon."""
    one = Matrices()
    plain = make_muon(one)
    after: list[list[torch.Tensor]] = []
    for step in range(4):
        units = [torch.autograd.grad(muon_step(one, step, i, 1), list(one.parameters())) for i in range(4)]
        for parameter, *grads in zip(one.parameters(), *units, strict=True):
            parameter.grad = ((grads[0] + grads[1]) + (grads[2] + grads[3])) / 4
        plain.step()
        after.append([p.detach().clone() for p in one.parameters()])
    found = {}
    for num_ranks in (1, 2, 4):
        mesh = init_device_mesh("cpu", (4 // num_ranks, num_ranks), mesh_dim_names=("copy", "dp"))
        ddp = DistributedDataParallel(Matrices(), mesh["dp"], options=DDPOptions(exact=True))
        owned = MuonByOwner(make_muon(ddp.module), ddp)
        for step in range(3):
            train_muon(ddp, owned, step)
        found[f"{num_ranks} ranks"] = same(ddp.module, after[2])
        found[f"{num_ranks} ranks hold momentum once"] = count_momentum(owned, ddp.group) == 3
    with vc.Checkpointer(vc.open_store(Path(folder) / "muon"), "run") as ckpt:
        ckpt.save(3, {"model": ddp, "optimizer": owned})
        restored = Matrices()
        again = make_muon(restored)
        ckpt.load({"model": restored, "optimizer": again}, 3)
        shapes = [tuple(again.state[p]["momentum_buffer"].shape) for p in restored.parameters()]
        found["plain has all momentum"] = shapes == [tuple(p.shape) for p in restored.parameters()]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "dp"))
        ddp = DistributedDataParallel(Matrices(), mesh["dp"], options=DDPOptions(exact=True))
        owned = MuonByOwner(make_muon(ddp.module), ddp)
        ckpt.load({"model": ddp, "optimizer": owned}, 3)
    train_muon(ddp, owned, 3)
    found["goes on"] = same(ddp.module, after[3])
    found["by state_dict"] = load_by_state_dict(again, restored, after[3])
    found["tensor parallel"] = muon_with_tensor_parallelism(after[2])
    return found


def load_by_state_dict(plain, model, expected) -> bool:
    ddp = DistributedDataParallel(Matrices(), options=DDPOptions(exact=True))
    ddp.load_state_dict(model.state_dict())
    owned = MuonByOwner(make_muon(ddp.module), ddp)
    owned.load_state_dict(plain.state_dict())
    train_muon(ddp, owned, 3)
    return same(ddp.module, expected)


def train_muon(ddp, owned, step) -> None:
    rank, each = dist.get_rank(ddp.group), 4 // ddp.num_ranks
    for index in range(rank * each, (rank + 1) * each):
        muon_step(ddp, step, index, 1).backward()
    owned.step()
    owned.zero_grad()


def same(model: nn.Module, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(whole(a), b) for a, b in zip(model.parameters(), expected, strict=True))


def count_momentum(owned, group) -> int:
    count = torch.tensor(len(owned.state))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(count, group=group)
    return int(count)


def muon_with_tensor_parallelism(expected: list[torch.Tensor]) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Matrices()
    parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    ddp = DistributedDataParallel(model, mesh, options=DDPOptions(mean_over="nothing"))
    owned = MuonByOwner(make_muon(model), ddp, clip_grad=math.inf)
    for step, index in itertools.product(range(3), (0, 1)):
        sync = index == 1
        unit = 2 * mesh.get_local_rank("dp") + index
        loss = muon_step(model, step, unit, 4)
        if sync:
            loss.backward()
            owned.step()
            owned.zero_grad()
        else:
            with ddp.no_sync():
                loss.backward()
    return all(torch.allclose(whole(a), b, atol=2e-2) for a, b in zip(model.parameters(), expected, strict=True))


def chosen() -> dict:
    """What ``optimizer`` takes on four data-parallel ranks."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    zero = optimizer(gpt.make(), torch.optim.AdamW, mesh=mesh, lr=1e-3, clip_grad=1.0, bucket_size=300)
    gpt.loss_of(zero.models[0].module, gpt.micro_batch(0, dist.get_rank())).backward()
    zero.step()
    basic = optimizer(gpt.make(), torch.optim.SGD, mesh=mesh, zero=0, lr=1e-3)
    muon = optimizer(Matrices(), torch.optim.Muon, mesh=mesh, lr=1e-3)
    third = optimizer(gpt.make(), torch.optim.AdamW, mesh=mesh, zero=3)
    fourth = optimizer(gpt.make(), torch.optim.Adafactor, mesh=mesh)
    alone = optimizer(gpt.make(), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
    return {
        "zero": isinstance(zero, DistributedOptimizer) and zero.defaults["lr"] == 1e-3 and bool(zero.grad_norm > 0),
        "basic": isinstance(basic, BasicOptimizer) and isinstance(basic.optimizer, torch.optim.SGD),
        "muon": isinstance(muon, MuonByOwner),
        "third": isinstance(third, BasicOptimizer) and isinstance(third.param_groups[0]["params"][0], DTensor),
        "fourth": isinstance(fourth, BasicOptimizer),
        "tp alone": isinstance(alone, BasicOptimizer) and alone.models[0].num_ranks == 1,
    }
