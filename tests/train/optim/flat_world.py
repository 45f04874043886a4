"""What four ranks do with blocks in flat buffers, beside one device."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import vescale_ckpt as vc
from tests.train.ddp import gpt
from vescale_train.comm import units_of
from vescale_train.ddp import DDPOptions
from vescale_train.optim import BasicOptimizer, FlatShardedDataParallel, recompute_activations

STEPS, MAX_NORM = 3, 0.5


def check(folder: str) -> dict:
    return {
        "exact": {f"{n} ranks": exact(n) for n in (1, 2, 4)},
        "fast": fast(),
        "recomputed": exact(2, recompute=True),
        "let go of": let_go_of(),
        "checkpoints": checkpoints(folder),
    }


def reference(steps: int = STEPS):
    model = gpt.make()
    optimizer = gpt.adamw(model)
    for step in range(steps):
        gpt.one_device_step(model, optimizer, step, MAX_NORM)
    return model, optimizer


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(gpt.groups(model), lr=1e-2, foreach=False)


def wrap(num_ranks: int, *, is_exact: bool, recompute: bool = False):
    mesh = init_device_mesh("cpu", (4 // num_ranks, num_ranks), mesh_dim_names=("copy", "mine"))
    flat = FlatShardedDataParallel(gpt.make(), mesh["mine"], options=DDPOptions(exact=is_exact, mean_over="passes"))
    if recompute:
        recompute_activations(flat.module)
    return flat, BasicOptimizer(adamw(flat.module), flat, clip_grad=MAX_NORM)


def train(flat, optimizer, steps) -> None:
    for step in steps:
        for index in units_of(dist.get_rank(flat.group), flat.num_ranks, gpt.MICRO_BATCHES):
            gpt.loss_of(flat, gpt.micro_batch(step, index)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def same(flat, model) -> bool:
    names = [name for name, _ in flat.module.named_parameters()]
    pairs = zip(flat.module.parameters(), model.parameters(), strict=True)
    return names == [name for name, _ in model.named_parameters()] and all(torch.equal(whole(a), b) for a, b in pairs)


def exact(num_ranks: int, *, recompute: bool = False) -> bool:
    flat, optimizer = wrap(num_ranks, is_exact=True, recompute=recompute)
    train(flat, optimizer, range(STEPS))
    return same(flat, reference()[0])


def fast() -> dict:
    flat, optimizer = wrap(4, is_exact=False)
    train(flat, optimizer, range(STEPS))
    pairs = zip(flat.module.parameters(), reference()[0].parameters(), strict=True)
    unused = flat.module.unused
    return {
        "numbers": max(float((whole(a) - b).norm() / b.norm()) for a, b in pairs) < 1e-6,
        "ragged": isinstance(unused, DTensor) and unused.to_local().numel() in {0, 5},
        "unused": unused.grad is None and not optimizer.state.get(unused),
    }


def let_go_of() -> dict:
    """Whole parameters are there only while their block computes."""
    flat, _ = wrap(4, is_exact=False)
    seen = []
    blocks = list(flat.module.blocks)
    blocks[1].register_forward_pre_hook(lambda *_: seen.append([block.is_gathered for block in flat.blocks]))
    loss = gpt.loss_of(flat, gpt.micro_batch(0, 0))
    after_forward = [block.is_gathered for block in flat.blocks]
    loss.backward()
    after_backward = [block.is_gathered for block in flat.blocks]
    held = sum(p.to_local().numel() for p in flat.module.parameters() if isinstance(p, DTensor))
    total = torch.tensor(held)
    dist.all_reduce(total)
    return {
        "before a block": seen == [[False, False, True]],
        "after forward": after_forward == [False] * 3,
        "after backward": after_backward == [False] * 3,
        "every element once": int(total) == sum(p.numel() for p in gpt.make().parameters() if p.requires_grad),
        "evenly": held < int(total) / 2,
    }


def checkpoints(folder: str) -> dict:
    """Save in exact mode, load on one rank into plain AdamW and on two ranks into flat blocks, and go on."""
    flat, optimizer = wrap(4, is_exact=True)
    train(flat, optimizer, range(2))
    store = vc.open_store(Path(folder) / "store")
    with vc.Checkpointer(store, "run") as ckpt:
        ckpt.save(2, {"model": flat, "optimizer": optimizer})
        plain = gpt.make()
        adam = gpt.adamw(plain)
        ckpt.load({"model": plain, "optimizer": adam}, 2)
        again, other = wrap(2, is_exact=True)
        ckpt.load({"model": again, "optimizer": other}, 2)
    gpt.one_device_step(plain, adam, 2, MAX_NORM)
    train(again, other, [2])
    expected = reference()[0]
    pairs = zip(plain.parameters(), expected.parameters(), strict=True)
    return {"plain": all(torch.equal(a, b) for a, b in pairs), "other ranks": same(again, expected)}
