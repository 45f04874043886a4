"""What four ranks do with data parallelism alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_train.comm import tree_sum, units_of
from vescale_train.ddp import DDPOptions, DistributedDataParallel
from vescale_train.errors import InvalidInputError


def check() -> dict:
    return {
        "overlap": overlap(),
        "mean": mean(),
        "uneven use": uneven_use(),
        "tensor parallel": tensor_parallel(),
        "exact uneven": exact_uneven(),
        "two axes": two_axes(),
        "apart": apart(),
    }


def layers(count: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(count)))


def data(index: int) -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(index))


def gradient_of(model: nn.Module, index: int) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(data(index)).pow(2).mean(), list(model.parameters())))


def overlap() -> list[str]:
    """Record what happens in one backward pass; the first layer waits for the first bucket before it goes on."""
    model = layers()
    ddp = DistributedDataParallel(model, bucket_size=50)
    events: list[str] = []
    expected = torch.stack([gradient_of(layers(), rank)[-1] for rank in range(4)]).mean(0)
    for number, bucket in enumerate(ddp.buckets):

        def start(*args, number=number, start=bucket.start):
            events.append(f"bucket {number} started")
            start(*args)

        bucket.start = start

    def first_layer(_):
        ddp.buckets[0].finish()
        events.extend(["bucket 0 reduced"] * torch.allclose(ddp.buckets[0].gradient(0), expected, atol=1e-7))
        events.append("first layer's gradient")

    model[0].bias.register_hook(first_layer)
    ddp(data(dist.get_rank())).pow(2).mean().backward()
    events.append("backward ended")
    ddp.finish_grad_sync()
    return events


def mean() -> bool:
    """The default: the mean over ranks, over two passes a rank."""
    model = layers()
    ddp = DistributedDataParallel(model, bucket_size=100)
    rank = dist.get_rank()
    with ddp.no_sync():
        ddp(data(2 * rank)).pow(2).mean().div(2).backward()
    ddp(data(2 * rank + 1)).pow(2).mean().div(2).backward()
    ddp.finish_grad_sync()
    units = [gradient_of(layers(), index) for index in range(8)]
    expected = [torch.stack(found).mean(0) for found in zip(*units, strict=True)]
    return all(torch.allclose(p.grad, e, atol=1e-7) for p, e in zip(model.parameters(), expected, strict=True))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.often, self.once, self.never = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x, once):
        return self.once(self.often(x)) if once else self.often(x)


def uneven_use() -> bool:
    """One rank alone uses a layer, and one layer nobody uses; ranks complete their buckets in different orders."""
    model = Branch()
    ddp = DistributedDataParallel(model, bucket_size=10)
    ddp(data(dist.get_rank()), dist.get_rank() == 2).pow(2).mean().backward()
    ddp.finish_grad_sync()
    plain = Branch()
    plain(data(2), True).pow(2).mean().backward()
    never = all(p.grad is None for p in model.never.parameters())
    return never and torch.allclose(model.once.weight.grad, plain.once.weight.grad / 4, atol=1e-7)


def tensor_parallel() -> bool:
    """Gradients of DTensor parameters come back as their parameters are laid out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 7))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = DistributedDataParallel(model, mesh, bucket_size=10)
    ddp(data(mesh.get_local_rank("dp"))).pow(2).mean().backward()
    ddp.finish_grad_sync()
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 7))
    (sum(plain(data(i)).pow(2).mean() for i in (0, 1)) / 2).backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    return all(
        a.grad.placements == a.placements and torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-7) for a, b in pairs
    )


def exact_uneven() -> bool:
    """Seven and three micro-batches over four ranks, sharded and not: the bits of one tree."""
    right = []
    for num_units, shard in ((7, False), (3, False), (7, True), (3, True)):
        model = layers()
        ddp = DistributedDataParallel(
            model, use_distributed_optimizer=shard, bucket_size=100, options=DDPOptions(exact=True)
        )
        ddp.num_micro_batches = num_units
        for index in units_of(dist.get_rank(), 4, num_units):
            ddp(data(index)).pow(2).mean().backward()
        ddp.finish_grad_sync()
        units = [gradient_of(layers(), index) for index in range(num_units)]
        expected = [tree_sum(found).div_(num_units) for found in zip(*units, strict=True)]
        place = {id(p): e for p, e in zip(model.parameters(), expected, strict=True)}
        for bucket in ddp.buckets:
            bucket.gather()
            for number, parameter in enumerate(bucket.parameters):
                right.append(torch.equal(bucket.gradient(number), place[id(parameter)].reshape(-1)))
    return all(right)


def two_axes() -> bool:
    """Data-parallel ranks are those of ``dp`` and ``fsdp`` together; other axes do not count."""
    both = DistributedDataParallel(layers(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")))
    one = DistributedDataParallel(layers(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    none = DistributedDataParallel(layers(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))
    return (both.num_ranks, one.num_ranks, none.num_ranks) == (4, 2, 1)


def apart() -> str:
    model = layers(2)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model[1].bias[0] += 1
    try:
        DistributedDataParallel(model)
    except InvalidInputError as error:
        return str(error)
    return "not refused"
