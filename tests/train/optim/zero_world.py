"""What four ranks do to a GPT with data parallelism of 1, 2 and 4 and every stage of ZeRO, beside one device."""

from __future__ import annotations

import contextlib
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.train.ddp import gpt
from vescale_train.comm import units_of
from vescale_train.ddp import DDPOptions, DistributedDataParallel
from vescale_train.optim import BasicOptimizer, DistributedOptimizer

STEPS, MAX_NORM = 3, 0.5


def reference(steps: int = STEPS):
    model = gpt.make()
    optimizer = gpt.adamw(model)
    for step in range(steps):
        gpt.one_device_step(model, optimizer, step, MAX_NORM)
    return model, optimizer


def wrap(num_ranks: int, stage: int, *, exact: bool = False, dtype=torch.float32, overlap: bool = False):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // num_ranks, num_ranks), mesh_dim_names=("copy", "dp"))
    model = gpt.make(dtype)
    options = DDPOptions(exact=exact, mean_over="passes", shard_gradients=stage == 2)
    ddp = DistributedDataParallel(
        model,
        mesh["dp"],
        accumulate_allreduce_grads_in_fp32=dtype != torch.float32,
        use_distributed_optimizer=stage > 0,
        bucket_size=500,
        options=options,
    )
    plain = gpt.adamw(model)
    if stage:
        return ddp, DistributedOptimizer(plain, ddp, clip_grad=MAX_NORM, overlap_param_gather=overlap)
    return ddp, BasicOptimizer(plain, ddp, clip_grad=MAX_NORM)


def train(ddp, optimizer, steps) -> None:
    rank = dist.get_rank(ddp.group)
    for step in steps:
        mine = units_of(rank, ddp.num_ranks, gpt.MICRO_BATCHES)
        for index in mine:
            last = index == mine[-1]
            with contextlib.nullcontext() if last else ddp.no_sync():
                gpt.loss_of(ddp.module, gpt.micro_batch(step, index)).backward()
        optimizer.step()
        optimizer.zero_grad()


def largest_difference(one, other) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def is_same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def check() -> dict:
    wanted, _ = reference()
    found: dict = {"fast": {}, "exact": {}}
    for num_ranks, stage in itertools.product((1, 2, 4), (0, 1, 2)):
        for exact in (False, True):
            ddp, optimizer = wrap(num_ranks, stage, exact=exact, overlap=stage == 2)
            train(ddp, optimizer, range(STEPS))
            if stage:
                optimizer.finish_param_sync()
            key = f"{num_ranks} ranks, ZeRO {stage}"
            if exact:
                found["exact"][key] = is_same(ddp.module, wanted)
            else:
                found["fast"][key] = largest_difference(ddp.module, wanted)
    return found
