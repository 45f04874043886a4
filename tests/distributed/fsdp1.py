"""What ranks do with FSDP's first generation: save from it and load into it, between worlds and from and to others."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import vescale_ckpt as vc
from vescale_ckpt.errors import InvalidInputError

STEPS = 3


class Block(nn.Module):
    """A module to wrap on its own; no size is divided by a number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks, a tie, a frozen parameter, three dims, fewer elements than ranks, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.one = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(5, 7), requires_grad=False)
        self.register_buffer("calls", torch.arange(4))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden * self.one + self.cube.sum((0, 1)) + self.frozen.sum(0))


def flattened(strategy=ShardingStrategy.FULL_SHARD, **more):
    def wrap(model):
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
            **more,
        )

    return wrap


def in_blocks(model):
    return flattened(auto_wrap_policy=ModuleWrapPolicy({Block}))(model)


def fsdp2(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


LAYOUTS = {
    "one bucket": flattened(),
    "in blocks": in_blocks,
    "kept gathered": flattened(ShardingStrategy.SHARD_GRAD_OP),
    "not sharded": flattened(ShardingStrategy.NO_SHARD),
    "checkpointed": lambda model: in_blocks(_checkpointed(model)),
    "fsdp2": fsdp2,
    "ddp": nn.parallel.DistributedDataParallel,
}


def _checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: PLC0415 - few need it
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def train(model, optimizer, steps, seed=0):
    """Take steps on the same data on every rank; return the last loss."""
    loss = torch.zeros(())
    for step in range(steps):
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed + step))
        optimizer.zero_grad()
        loss = model(tokens).pow(2).mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def make(layout, seed, steps):
    torch.manual_seed(seed)
    model = layout(Net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


def oracle(state) -> dict[str, torch.Tensor]:
    """Return all parameters and moments whole, as torch itself gathers them."""
    model, optimizer = state["model"], state["optimizer"]
    options = StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls functions of its own that it deprecates
        found = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        names = {f"{name}/{key}": value for name, kept in found.items() for key, value in kept.items()}
        if isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                return names | {n: p.detach().clone() for n, p in clean(model.named_parameters())}
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in clean(model.named_parameters())}
    return names | {n: p.detach().clone() for n, p in whole.items()}


def clean(named):
    """Yield names without wrappers."""
    for name, value in named:
        for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module."):
            name = name.replace(wrapper, "")  # noqa: PLW2901 - the name without it
        yield name, value


def same(one, other, what):
    assert one.keys() == other.keys(), (what, one.keys() ^ other.keys())
    for name, value in one.items():
        assert torch.equal(value, other[name]), (what, name, value, other[name])


@functools.cache
def first_alone() -> dist.ProcessGroup:
    return dist.new_group([0], use_local_synchronization=True)


def save_all(folder: str) -> dict:
    """Save a model that was trained on every layout, and one of rank 0 alone; return the runs, and what is refused."""
    store = vc.open_store(Path(folder) / "store")
    for name, layout in LAYOUTS.items():
        state = make(layout, 1, STEPS)
        with vc.Checkpointer(store, name) as ckpt:
            ckpt.save(1, state)
        found = oracle(state)
        if dist.get_rank() == 0:
            torch.save(found, Path(folder) / f"{name}.pt")
    if dist.get_rank() == 0:
        state = make(lambda model: model, 1, STEPS)
        with vc.Checkpointer(store, "alone", process_group=first_alone()) as ckpt:
            ckpt.save(1, state)
        torch.save(oracle_of_one(state), Path(folder) / "alone.pt")
    return {"runs": [*LAYOUTS, "alone"], "refused": refused(folder)}


def oracle_of_one(state) -> dict[str, torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state.get(p, {}).items()}
    return found


def load_all(folder: str, targets: list[str]) -> list[list]:
    """Load every run into layouts of this world, fresh and used; return [saved, loaded, loss of the next step]."""
    store = vc.open_store(Path(folder) / "store", create=False)
    rows = []
    runs = [*LAYOUTS, "alone"]
    for name in targets:
        layout = LAYOUTS[name]
        for number, run in enumerate(runs):
            expected = torch.load(Path(folder) / f"{run}.pt", weights_only=True)
            state = make(layout, 99, number % 2)  # every other optimizer has stepped before
            if number % 3 == 0:
                with torch.no_grad():
                    state["model"](torch.zeros(1, 2, dtype=torch.int64))  # leaves the root gathered
            with vc.Checkpointer(store, run) as ckpt:
                ckpt.load(state)
            same(oracle(state), expected, f"{run} into {name}")
            rows.append([run, name, train(state["model"], state["optimizer"], 1, seed=STEPS)])
    if dist.get_rank() == 0:
        for run in runs:
            expected = torch.load(Path(folder) / f"{run}.pt", weights_only=True)
            state = make(lambda model: model, 99, 0)
            with vc.Checkpointer(store, run, process_group=first_alone()) as ckpt:
                ckpt.load(state)
            same(oracle_of_one(state), expected, f"{run} alone")
            assert state["model"].head.weight is state["model"].embed.weight
            rows.append([run, "alone", train(state["model"], state["optimizer"], 1, seed=STEPS)])
    return rows


def refused(folder: str) -> dict[str, str]:
    """Return what is said of what has no names."""
    without_names = FullyShardedDataParallel(Net().requires_grad_(True), device_id=torch.device("cpu"))
    ckpt = vc.Checkpointer(vc.open_store(Path(folder) / "refused"), "run")
    found = {}
    state = make(flattened(), 0, 1)

    def outcome(save):
        try:
            save()
        except InvalidInputError as error:
            return str(error)
        return "saved"

    found["without names"] = outcome(lambda: ckpt.save(0, {"model": without_names}))
    with FullyShardedDataParallel.summon_full_params(state["model"], writeback=False):
        found["summoned"] = outcome(lambda: ckpt.save(0, state))
    found["after"] = outcome(lambda: ckpt.save(0, state))
    return found
