"""Four ranks draw what one device draws: every layout of every random operation, whole models, and parts of a batch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn import functional

from vescale_train.errors import InvalidInputError, LayoutError
from vescale_train.rng import initialize, single_device_rng

MESHES = ((1,), (3,), (4,), (2, 2))
SHAPES = ((), (7,), (4, 6), (5, 3, 2))


def half(x):
    return torch.full_like(x, 0.5)


OPERATIONS = {
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "random_": lambda x: x.random_(2, 900),
    "random_ to": lambda x: x.random_(9),
    "random_ all": lambda x: x.random_(),
    "exponential_": lambda x: x.exponential_(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 50),
    "randint_like low": lambda x: torch.randint_like(x, -5, 50),
    "bernoulli": lambda x: torch.bernoulli(half(x)),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.5),
    "dropout": lambda x: functional.dropout(torch.ones_like(x), 0.4),
    "native_dropout": lambda x: torch.native_dropout(torch.ones_like(x), 0.4, True)[0],
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=2.0),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x) if x.ndim > 1 else x,
    "xavier_normal_": lambda x: nn.init.xavier_normal_(x) if x.ndim > 1 else x,
}


class Block(nn.Module):
    """Linears whose sizes do not divide, norms, an embedding, and dropout after each."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.drop, self.again = nn.Dropout(0.4), nn.Dropout(0.4)

    def forward(self, tokens):
        x = self.drop(self.embed(tokens))
        return self.again(self.second(torch.tanh(self.first(self.norm(x)))))


def meshes():
    """Yield meshes of the first ranks; every rank helps to make them, those outside have no coordinate."""
    for shape in MESHES:
        ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")[: ranks.ndim])
        if mesh.get_coordinate() is not None:
            yield mesh


def placements_for(mesh, ndim):
    one = [Replicate(), *(Shard(d) for d in range(ndim))]
    return itertools.product(one, repeat=mesh.ndim)


def same(got, want, what):
    assert isinstance(got, DTensor), what
    assert torch.equal(got.full_tensor(), want), what


def check() -> dict[str, int]:
    equal_slices = stock()
    made = list(meshes())
    bodies = (operations, models, dropout, batches, refusals)
    return {"stock": equal_slices} | {body.__name__: sum(body(mesh) for mesh in made) for body in bodies}


def operations(mesh) -> int:
    count = 0
    for shape in SHAPES:
        plain = torch.zeros(shape)
        with single_device_rng(11):
            want = {
                name: (operation(plain.clone()), operation(plain.clone())) for name, operation in OPERATIONS.items()
            }
            end = torch.rand(3)
        for placements in placements_for(mesh, len(shape)):
            with single_device_rng(11):
                for name, operation in OPERATIONS.items():
                    for once in want[name]:
                        laid_out = distribute_tensor(plain.clone(), mesh, placements)
                        same(operation(laid_out), once, (name, shape, placements))
                        count += 1
                assert torch.equal(torch.rand(3), end)
    return count


def models(mesh) -> int:
    """Built and initialised as DTensors, by tensor parallel and FSDP layouts: the parameters of one device."""
    count = 0
    with single_device_rng(5):
        single = Block()
        initialize(single)
    want = {name: parameter.detach() for name, parameter in single.named_parameters()}

    def shard(dim):
        def partition(_name, module, mesh):
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = [Shard(min(dim, parameter.ndim - 1))] + [Replicate()] * (mesh.ndim - 1)
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, cut)))

        return partition

    for dim in (0, 1):
        model = distribute_module(Block(), mesh, shard(dim))
        with single_device_rng(5):
            initialize(model)
        for name, parameter in model.named_parameters():
            same(parameter.detach(), want[name], (name, dim))
            count += 1
    if mesh.ndim == 1:
        with torch.device("meta"):
            model = Block()
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        with single_device_rng(5):
            initialize(model)
        for name, parameter in model.named_parameters():
            same(parameter.detach(), want[name], (name, "fsdp"))
            count += 1
    return count


def dropout(mesh) -> int:
    """Of activations in any layout, with the gradients."""
    count = 0
    plain = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    drop = nn.Dropout(0.4)
    with single_device_rng(3, drop):
        leaf = plain.clone().requires_grad_()
        want = drop(leaf)
        want.square().sum().backward()
    for placements in placements_for(mesh, 2):
        with single_device_rng(3, drop):
            x = distribute_tensor(plain, mesh, placements).requires_grad_()
            out = drop(x)
            out.square().sum().backward()
        same(out.detach(), want.detach(), placements)
        same(x.grad, leaf.grad, placements)
        count += 1
    return count


def batches(mesh) -> int:
    """Data parallel with plain tensors, and with tensor parallel beside it: samples keep their numbers."""
    count = 0
    num_ranks, rank = mesh.size(0), mesh.get_local_rank(0)
    tokens = torch.randint(0, 11, (12, 3), generator=torch.Generator().manual_seed(1))
    model = Block()
    with single_device_rng(3, model) as rng:
        initialize(model)
        with rng.batch(0, 12, 12):
            want = model(tokens)
        for sizes in ([12 // num_ranks] * num_ranks, [*range(1, num_ranks), 12 - num_ranks * (num_ranks - 1) // 2]):
            start = sum(sizes[:rank])
            for micro in (1, 2, sizes[rank]):
                rng.start_step(0)
                for at in range(start, start + sizes[rank], micro):
                    held = min(micro, start + sizes[rank] - at)
                    with rng.batch(at, held, 12):
                        got = model(tokens[at : at + held])
                    assert torch.equal(got == 0, want[at : at + held] == 0)
                    torch.testing.assert_close(got, want[at : at + held])
                    count += 1
    with single_device_rng(4) as rng:
        with rng.batch(0, 4, 4):
            whole = torch.randn(8, 6)
        rng.start_step(0)
        if mesh.ndim == 2:
            mine = distribute_tensor(torch.zeros(4, 6), mesh["tp"], [Shard(1)])
            with rng.batch(2 * rank, 2, 4):
                mine.normal_()
            same(mine, whole[4 * rank : 4 * rank + 4], "beside tensor parallel")
            count += 1
    return count


def refusals(mesh) -> int:
    sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)] * mesh.ndim)
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()] * mesh.ndim)
    with single_device_rng(0):
        with pytest.raises(LayoutError, match="still to be made"):
            partial.normal_()
        with pytest.raises(InvalidInputError, match="generator of its own"):
            sharded.normal_(generator=torch.Generator())
        with pytest.raises(InvalidInputError, match="multinomial"):
            torch.multinomial(sharded, 1)
        with pytest.raises(InvalidInputError, match="geometric_"):
            sharded.geometric_(0.5)
    return 4


def stock() -> int:
    """What torch does without the switch: how many slices of a sharded tensor are equal."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="DTensor random operators may not have complete support"):
        made = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]).normal_().full_tensor()
    return sum(torch.equal(row, made[0]) for row in made)
