"""Four ranks: the loss of one device in every layout of logits and targets, where torch's is wrong or refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from vescale_train.comm import tree_sum
from vescale_train.errors import ConfigError, LayoutError
from vescale_train.loss import cross_entropy, parallel_loss

MESHES = ((3,), (4,), (2, 2))
SHAPES = (((7, 10), (7,)), ((4, 5, 3), (4, 3)), ((8, 6), (8,)))
OPTIONS = [
    {},
    {"ignore_index": 3},
    {"label_smoothing": 0.1, "ignore_index": 3},
    {"reduction": "sum", "ignore_index": 3},
    {"reduction": "none", "label_smoothing": 0.3},
]


def meshes():
    for shape in MESHES:
        ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")[: ranks.ndim])
        if mesh.get_coordinate() is not None:
            yield mesh


def case(shape, target_shape):
    generator = torch.Generator().manual_seed(sum(shape))
    target = torch.randint(0, shape[1], target_shape, generator=generator)
    target.view(-1)[: target.numel() // 2] = 3  # what is ignored is on the first ranks
    return torch.randn(shape, generator=generator), target, torch.rand(shape[1], generator=generator) + 0.1


def check() -> dict[str, int]:
    counts = {"layouts": 0, "groups": 0, "exact": 0, "refusals": 0}
    for mesh in meshes():
        for body in (layouts, groups, exact, refusals):
            counts[body.__name__] += body(mesh)
    return counts | torch_alone()


def close(got, want, what):
    torch.testing.assert_close(got.full_tensor(), want, msg=lambda text: f"{what}: {text}")


def layouts(mesh) -> int:
    count = 0
    for (shape, target_shape), options, weighted in itertools.product(SHAPES, OPTIONS, (False, True)):
        logits, target, weight = case(shape, target_shape)
        weight = weight if weighted else None
        leaf = logits.clone().requires_grad_()
        want = functional.cross_entropy(leaf, target, weight, **options)
        want.sum().backward()
        cuts = [Replicate(), *(Shard(d) for d in range(len(shape)))]
        for placements in itertools.product(cuts, repeat=mesh.ndim):
            x = distribute_tensor(logits, mesh, placements).requires_grad_()
            laid_out = target if count % 2 else distribute_tensor(target, mesh, [Replicate()] * mesh.ndim)
            got = cross_entropy(x, laid_out, weight, **options)
            close(got, want.detach(), f"{placements} {options}")
            got.sum().backward()
            close(x.grad, leaf.grad, f"gradient of {placements} {options}")
            count += 1
    partial = DTensor.from_local(logits / mesh.size(), mesh, [Partial()] * mesh.ndim)
    torch.testing.assert_close(cross_entropy(partial, target).full_tensor(), functional.cross_entropy(logits, target))
    with parallel_loss():
        x = distribute_tensor(logits, mesh, [Shard(0)] * mesh.ndim)
        ours = nn.CrossEntropyLoss(weight, ignore_index=3)(x, target)
        torch.testing.assert_close(ours.full_tensor(), functional.cross_entropy(logits, target, weight, ignore_index=3))
    return count


def groups(mesh) -> int:
    """Plain tensors: classes over one group, tokens over another; gradients of ranks add up to one device's."""
    if mesh.ndim != 2:
        return 0
    logits, target, weight = case((7, 9), (7,))
    leaf = logits.clone().requires_grad_()
    want = functional.cross_entropy(leaf, target, weight, ignore_index=3, label_smoothing=0.1)
    want.backward()
    dp, tp = mesh.get_coordinate()
    rows, columns = [slice(0, 3), slice(3, 7)][dp], [slice(0, 2), slice(2, 9)][tp]
    for is_exact in (False, True):
        mine = logits[rows, columns].clone().requires_grad_()
        got = cross_entropy(
            mine,
            target[rows],
            weight,
            ignore_index=3,
            label_smoothing=0.1,
            class_group=mesh.get_group("tp"),
            token_group=mesh.get_group("dp"),
            exact=is_exact,
        )
        torch.testing.assert_close(got, want)
        got.backward()
        torch.testing.assert_close(mine.grad, leaf.grad[rows, columns])
    return 2


def exact(mesh) -> int:
    """The bits of one device that has the same tokens in as many parts."""
    logits, target, weight = case((12, 10), (12,))
    logits = logits.repeat(40, 1)
    target = target.repeat(40)
    leaf = logits.clone().requires_grad_()
    single = cross_entropy(leaf, target, weight, ignore_index=3, label_smoothing=0.1, exact=True)
    single.backward()
    x = distribute_tensor(logits, mesh, [Shard(1)] * mesh.ndim).requires_grad_()
    got = cross_entropy(x, target, weight, ignore_index=3, label_smoothing=0.1, exact=True)
    got.backward()
    assert torch.equal(got.full_tensor(), single.detach())
    assert torch.equal(x.grad.full_tensor(), leaf.grad)
    if mesh.ndim == 1:
        parts = zip(logits.chunk(mesh.size()), target.chunk(mesh.size()), strict=True)
        sums = [cross_entropy(a, b, reduction="sum", exact=True) for a, b in parts]
        y = distribute_tensor(logits, mesh, [Shard(0)])
        assert torch.equal(cross_entropy(y, target, reduction="sum", exact=True).full_tensor(), tree_sum(sums))
    return 2


def refusals(mesh) -> int:
    logits, target, _ = case((8, 6), (8,))
    x = distribute_tensor(logits, mesh, [Shard(0)] * mesh.ndim)
    with pytest.raises(LayoutError, match=r"need targets of shape \(8,\)"):
        cross_entropy(x, target[:5])
    with pytest.raises(ConfigError, match="leave class_group and token_group out"):
        cross_entropy(x, target, token_group=dist.group.WORLD)
    return 2


def torch_alone() -> dict[str, float]:
    """What torch gives for a batch on Shard(0) with ignored tokens or weights, and for log_softmax in its context."""
    mesh = DeviceMesh("cpu", torch.arange(4))
    logits, target, weight = case((8, 12), (8,))
    x, y = (distribute_tensor(t, mesh, [Shard(0)]) for t in (logits, target))
    w = distribute_tensor(weight, mesh, [Replicate()])
    right = functional.cross_entropy(logits, target, ignore_index=3)
    right_weighted = functional.cross_entropy(logits, target, weight)
    ignored = functional.cross_entropy(x, y, ignore_index=3).full_tensor()
    weighted = functional.cross_entropy(x, y, w).full_tensor()
    ours = cross_entropy(x, y, ignore_index=3).full_tensor()

    def gradient(context):
        z = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with context:
            functional.log_softmax(z, dim=1)[:, 0].sum().backward()
        return z.grad.full_tensor()

    leaf = logits.clone().requires_grad_()
    functional.log_softmax(leaf, dim=1)[:, 0].sum().backward()
    return {
        "torch, ignored tokens": float(ignored.isnan()),
        "torch, weights": float((weighted - right_weighted).abs() > 1e-3),
        "ours, ignored tokens": float((ours - right).abs() < 1e-6),
        "torch, log_softmax": float((gradient(loss_parallel()) - leaf.grad).abs().max() > 1e-3),
        "ours, log_softmax": float((gradient(parallel_loss()) - leaf.grad).abs().max() < 1e-6),
    }
