"""Each fault twice on four ranks: what torch alone gives, and that the guard refuses it, warns, or puts it right."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from vescale_train.errors import SilentFaultError
from vescale_train.guard import SilentFaultWarning, guard
from vescale_train.loss import parallel_loss
from vescale_train.rng import single_device_rng


class World:
    """Tensors on four ranks, made anew for each use."""

    def __init__(self):
        self.mesh = DeviceMesh("cpu", torch.arange(4))

    def laid_out(self, plain, placement):
        return distribute_tensor(plain, self.mesh, [placement])

    def rows(self):
        return self.laid_out(torch.zeros(8, 4), Shard(0))

    def sum(self):
        """Return a pending sum that is 45."""
        return self.laid_out(torch.arange(10.0), Shard(0)).sum()


def refused(fault, call):
    """Check that a call is refused in mode raise, said in mode warn, and let be in mode off."""
    with guard(), pytest.raises(SilentFaultError, match=f"^{fault}: ") as caught:
        call()
    assert caught.value.context["fault"] == fault
    with guard("warn"), pytest.warns(SilentFaultWarning, match=f"^{fault}: "):
        call()
    with guard(), guard("off"):
        call()


def silently(call):
    """Return what torch gives, with any warning of the guard an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SilentFaultWarning)
        return call()


def check() -> list[str]:
    world = World()
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    bodies = (
        s1_random,
        s2_writes,
        s2_views_that_are_views,
        s3_item,
        s10_loss,
        s11_number,
        s12_scalars,
        s13_log_softmax,
    )
    for body in bodies:
        body(world)
    return [body.__name__ for body in bodies]


def s1_random(world):
    made = world.rows().normal_().full_tensor()
    assert all(torch.equal(made[0:2], made[i : i + 2]) for i in (2, 4, 6)), "torch draws four equal slices"
    x = world.rows()
    drop = nn.Dropout(0.5)
    attention = [world.laid_out(torch.ones(4, 2, 3, 4), Shard(0)) for _ in range(3)]
    for call in (
        x.normal_,
        lambda: drop(x),
        lambda: torch.rand_like(x),
        lambda: nn.init.kaiming_uniform_(x),
        lambda: nn.init.normal_(x),
        lambda: nn.init.xavier_uniform_(x),
    ):
        refused("S1", call)
    with guard(), pytest.raises(SilentFaultError, match=r"^S1: scaled_dot"):
        functional.scaled_dot_product_attention(*attention, dropout_p=0.5)
    with guard():
        drop.eval()(x)
        functional.dropout(x, 0.5, training=False)
        functional.dropout(x, 0.0)
        world.laid_out(torch.zeros(8, 4), Replicate()).normal_()
        torch.empty(3).normal_()
    with guard(), single_device_rng(3):
        right = x.normal_().full_tensor()
    with single_device_rng(3):
        assert torch.equal(right, torch.empty(8, 4).normal_())


def s2_writes(world):
    x = world.rows()
    x[3].fill_(1)
    x[2:6].add_(1)
    x.narrow(0, 0, 2).fill_(5)
    x.select(0, 1)[1:].zero_()
    line = world.laid_out(torch.zeros(8), Shard(0))
    line[5] = 7.0
    assert silently(x.full_tensor).abs().max() == 0, "torch drops all of these writes"
    assert line.full_tensor().abs().max() == 0

    def assign(tensor, index):
        tensor[index] = 1.0

    for call in (
        lambda: x[3].fill_(1),
        lambda: x[2:6].add_(1),
        lambda: x.narrow(0, 0, 2).fill_(5),
        lambda: x.select(0, 1)[1:].fill_(0),
        lambda: x.chunk(2)[0].mul_(2),
        lambda: assign(line, 5),
        lambda: assign(line, (..., 5)),
    ):
        refused("S2", call)
    for index in (5, (slice(0, 3), 1), (..., slice(1, 4), slice(None)), (None, 2)):
        with guard(), pytest.raises(SilentFaultError, match=r"^S2: the assignment"):
            assign(x, index)
    embedding = nn.Embedding(8, 4, padding_idx=3)
    embedding.weight = nn.Parameter(world.laid_out(embedding.weight.detach(), Shard(0)))
    with single_device_rng(0):
        refused("S2", embedding.reset_parameters)


def s2_views_that_are_views(world):
    """Writes that torch does right pass."""
    with guard():
        x = world.rows()
        x[:, 1].fill_(1)
        x[..., 2:3].add_(2)
        x[:].add_(1)
        x.t().add_(1)
        x.unbind(1)[0].fill_(9)
        x.mul_(1)
    assert torch.equal(x.full_tensor(), torch.tensor([[9.0, 3, 4, 2]]).expand(8, 4))


def s3_item(world):
    total = world.sum()
    right = float(sum(range(10)))
    assert silently(total.item) != right, "torch reads this rank's part"
    refused("S3", total.item)
    with guard():
        assert total.full_tensor().item() == right
        assert world.laid_out(torch.ones(()), Replicate()).item() == 1
    with guard(scalar_reads="reduce"):
        assert total.item() == right


def s10_loss(world):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 6, generator=generator)
    target, weight = torch.tensor([2, -100, -100, -100, 0, 1, 2, 3]), torch.arange(1.0, 7)
    x, y = world.laid_out(logits, Shard(0)), world.laid_out(target, Shard(0))
    w = world.laid_out(weight, Replicate())
    z = world.laid_out(target.clamp(min=0), Shard(0))
    wanted = functional.cross_entropy(logits, target)
    assert functional.cross_entropy(x, y).full_tensor().isnan(), "torch gives the mean of means"
    weighted = functional.cross_entropy(logits, target.clamp(min=0), weight)
    assert (functional.cross_entropy(x, z, w).full_tensor() - weighted).abs() > 1e-3
    refused("S10", lambda: functional.cross_entropy(x, y))
    refused("S10", lambda: nn.CrossEntropyLoss(w)(x, z))
    with guard():
        functional.cross_entropy(x, z)
        functional.cross_entropy(x, y, reduction="sum")
        functional.cross_entropy(logits, target)
        with parallel_loss():
            torch.testing.assert_close(functional.cross_entropy(x, y).full_tensor(), wanted)
    with parallel_loss(), guard():
        torch.testing.assert_close(functional.cross_entropy(x, y).full_tensor(), wanted)


def s11_number(world):
    total = world.sum()
    total + torch.tensor(10)  # after this torch remembers a wrong rule for numbers
    assert (total + 10).full_tensor() != 55, "torch adds the number on every rank"
    with guard():
        assert (total + 10).full_tensor() == 55
        assert (10 + total).full_tensor() == 55
        assert (total - 10).full_tensor() == 35
        assert (10 - total).full_tensor() == -35
        assert (total + torch.tensor(10)).full_tensor() == 55
        assert torch.add(total, 10).full_tensor() == 55
        assert (total + total).full_tensor() == 90
    with guard("warn"), pytest.warns(SilentFaultWarning, match="^S11: "):
        assert (total + 10).full_tensor() != 55


def s12_scalars(world):
    x = torch.zeros(8)
    x[7] = torch.nan
    found = world.laid_out(x, Shard(0)).isnan().any()
    answers = [bool(found), float(found), int(found)]
    assert answers == ([True, 1.0, 1] if world.mesh.get_rank() == 3 else [False, 0.0, 0]), "each rank reads its own"
    mean = DTensor.from_local(torch.tensor(float(world.mesh.get_rank())), world.mesh, [Partial("avg")])
    for call in (lambda: bool(found), lambda: float(found), lambda: int(mean), lambda: 1 if found else 0):
        refused("S12", call)
    with guard(scalar_reads="reduce"):
        assert bool(found) is True
        assert float(mean) == 1.5
        assert int(world.sum()) == 45
        assert [1 if found else 0] == [1]


def s13_log_softmax(world):
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def gradient(context):
        x = world.laid_out(logits, Shard(1)).requires_grad_()
        with context:
            functional.log_softmax(x, dim=1)[:, 0].sum().backward()
        return x.grad.full_tensor()

    leaf = logits.clone().requires_grad_()
    functional.log_softmax(leaf, dim=1)[:, 0].sum().backward()
    assert (gradient(loss_parallel()) - leaf.grad).abs().max() > 1e-2, "torch's gradients are wrong"
    with guard():
        torch.testing.assert_close(gradient(parallel_loss()), leaf.grad)
    refused("S13", lambda: gradient(loss_parallel()))
    x, target = world.laid_out(logits, Shard(1)), world.laid_out(torch.tensor([0, 1, 2, 3]), Replicate())
    with guard(), loss_parallel():
        functional.cross_entropy(x, target)
    with pytest.raises(RuntimeError, match="mine"), parallel_loss():
        raise RuntimeError("mine")
    plain = world.laid_out(logits, Replicate())
    torch.testing.assert_close(
        functional.cross_entropy(plain, target).full_tensor(), functional.cross_entropy(logits, torch.arange(4))
    )
