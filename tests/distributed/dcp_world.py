"""What the ranks of real worlds do through torch.distributed.checkpoint on the store."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt as vc
from tests.cases.inputs import same_bits, tagged
from vescale_ckpt.interop.dcp import DCPReader, DCPWriter

SIZE = 1024
ASYNC, CACHED, NATIVE = 10, 20, 30


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a buffer and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.down(torch.relu(self.norm(self.up(hidden)))).sum() + self.head(hidden).sum()


def make(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(100 + step)
        model(torch.randint(0, 11, (4, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "epoch": 7, "extra": {"betas": (0.9, 0.95)}}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every tensor whole, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.full_tensor().detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def quietly(body):
    """Run with torch's warnings about its own internals left aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return body()


def matrix(placement) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tagged(SIZE, SIZE), mesh, [placement])


def save(folder: str) -> list[str]:
    """Save in every manner; return the names of what rank 0 says was committed."""
    return quietly(lambda: _save(Path(folder)))


def _save(folder: Path) -> list[str]:
    store = vc.open_store(folder / "store")
    model, optimizer = make(seed=1, steps=2)
    writer = DCPWriter(store, "run", 1)
    dcp.save(state_of(model, optimizer), storage_writer=writer)
    refs = [f"{writer.ref.run}@{writer.ref.step}"] if writer.ref is not None else []
    expected = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")

    apart = dist.new_group()  # its collectives run on another thread than those of training
    writer = DCPWriter(store, "run", ASYNC)
    future = dcp.async_save(state_of(model, optimizer), storage_writer=writer, process_group=apart)
    model(torch.ones(2, 2, dtype=torch.int64)).backward()
    optimizer.step()
    future.result()

    for step in (CACHED, CACHED + 1, CACHED + 2):
        state = {"w": distribute_tensor(tagged(50, 3) + step, _mesh(), [Shard(0)]), "step": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=DCPWriter(store, "cached", step), planner=planner)

    rows = {"w": matrix(Shard(0)), "copy": distribute_tensor(tagged(9), _mesh(), [Replicate()])}
    dcp.save(rows, storage_writer=DCPWriter(store, "rows", 1))
    dcp.save(rows, storage_writer=FileSystemWriter(folder / "torch"))
    target, other = make(seed=5, steps=0)
    state = {"model": target, "optimizer": other, "epoch": 0, "extra": {"betas": (0.0, 0.0)}}
    with vc.Checkpointer(store, "run") as ckpt:
        ckpt.load(state, 1)
        ckpt.save(NATIVE, state)
    return refs


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def load(folder: str) -> dict:
    """Load what was saved into FSDP2 on this world; return what reading columns of the matrix cost."""
    return quietly(lambda: _load(Path(folder)))


def _load(folder: Path) -> dict:
    store = vc.open_store(folder / "store")
    expected = torch.load(folder / "expected.pt")
    for step in (1, ASYNC, NATIVE):
        model, optimizer = make(seed=77 + step, steps=1)
        state = state_of(model, optimizer)
        state["epoch"], state["extra"] = 0, {"betas": (0.0, 0.0)}
        dcp.load(state, storage_reader=DCPReader(store, "run", step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert (state["epoch"], state["extra"]) == (7, {"betas": (0.9, 0.95)}), step
        _same(whole(model, optimizer), expected, step)
    model, optimizer = make(seed=3, steps=0)
    target = {"model": model, "optimizer": optimizer, "epoch": 0, "extra": {"betas": (0.0, 0.0)}}
    with vc.Checkpointer(store, "run") as ckpt:
        ckpt.load(target, ASYNC)
    _same(whole(model, optimizer), expected, "native load")

    for step in (CACHED, CACHED + 1, CACHED + 2):
        target = {"w": distribute_tensor(torch.zeros(50, 3), _mesh(), [Shard(1)]), "step": 0}
        dcp.load(target, storage_reader=DCPReader(store, "cached", step))
        assert target["step"] == step
        assert same_bits(target["w"].full_tensor(), tagged(50, 3) + step)

    columns = {"w": matrix(Shard(1)), "copy": distribute_tensor(torch.zeros(9), _mesh(), [Replicate()])}
    columns["w"].to_local().zero_()
    reader = DCPReader(store, "rows", 1)
    dcp.load(columns, storage_reader=reader)
    assert same_bits(columns["w"].full_tensor(), tagged(SIZE, SIZE))
    assert same_bits(columns["copy"].full_tensor(), tagged(9))
    counted = CountingReader(folder / "torch")
    dcp.load(columns, storage_reader=counted)
    needed = columns["w"].to_local().numel() * 4 + 9 * 4
    return {"needed": needed, "here": reader.counters.bytes_read, "torch": counted.num_bytes}


class CountingReader(FileSystemReader):
    """Torch's own reader, with a count of the bytes that it takes from files."""

    num_bytes = 0

    def _slice_file(self, file, sinfo):
        self.num_bytes += sinfo.length
        return super()._slice_file(file, sinfo)


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object) -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in found.items():
        assert same_bits(tensor, expected[name]), (what, name)
