"""How fast do four ranks of FSDP2 save, load as saved, and load laid out by columns?"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import vescale_ckpt as vc
from benchmarks.case import DCP, OURS, Case, Question, Ratio, against
from benchmarks.measure import evict
from benchmarks.peers import RUN, CountingReader, quiet
from benchmarks.states import noise, scale_shapes
from benchmarks.worlds import Samples, launch, over_ranks, together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Measurement

DCP_CACHED = f"{DCP}, cached plans"
_AS_SAVED, _BY_COLUMNS = ", as saved", ", as Shard(1)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks(Case):
    """Saves or loads of some ranks."""

    saves: bool
    cold: bool = False


def cases(scale: Scale) -> Sequence[Ranks]:
    del scale
    columns = Ratio(
        name="load wall, Shard(1) / as saved",
        of=(OURS + _BY_COLUMNS, "wall_seconds"),
        to=(OURS + _AS_SAVED, "wall_seconds"),
        at_most=1.5,
    )
    loads = [columns]
    for what in (_AS_SAVED, _BY_COLUMNS):
        loads += [
            Ratio(name=f"load{what}, {short} / DCP", of=(OURS + what, quantity), to=(DCP + what, quantity))
            for short, quantity in (("wall", "wall_seconds"), ("CPU", "cpu_seconds"), ("bytes read", "bytes_read"))
        ]
    saves = (against("save wall / DCP", "wall_seconds", DCP), against("save CPU / DCP", "cpu_seconds", DCP))
    return (
        Ranks(name="save, disk", storage="disk", saves=True, world_size=4, ratios=saves),
        Ranks(name="save, tmpfs", storage="tmpfs", saves=True, world_size=4, ratios=saves),
        Ranks(name="load, disk, cold", storage="disk", saves=False, cold=True, world_size=4, ratios=tuple(loads)),
        Ranks(name="load, tmpfs", storage="tmpfs", saves=False, world_size=4, ratios=tuple(loads)),
    )


def run(case: Ranks, bench: Bench) -> None:
    returned = launch(
        rank_body,
        case.world_size,
        deadline_seconds=case.deadline_seconds,
        folder=str(bench.folder),
        shapes=list(scale_shapes(bench.scale).items()),
        repeats=bench.repeats,
        saves=case.saves,
        cold=case.cold,
    )
    for side, samples in over_ranks(returned).items():
        bench.add(side, samples[0], first=True)
        for sample in samples[1:]:
            bench.add(side, sample)


def rank_body(folder: str, shapes: list[Any], repeats: int, saves: bool, cold: bool) -> Samples:
    """Be one rank: take turns at saving, or save once and take turns at loading."""
    world = _World(Path(folder), {name: tuple(shape) for name, shape in shapes})
    return world.save_turns(1 + repeats) if saves else world.load_turns(1 + repeats, cold=cold)


class _Parameters(nn.Module):
    """Parameters of given shapes, layer by layer, which is all that a checkpoint sees of a model."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.empty(shape)))


class _World:
    """One rank's part of the state and of the turns."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.folder = folder
        self.shapes = shapes
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.step = 0
        self.samples: Samples = {}

    def state(self, *, by_columns: bool = False, fill: bool = True) -> dict[str, Any]:
        """Return what this rank holds of a model under FSDP2 and of Adam's moments, as DTensors."""
        model = _Parameters(self.shapes)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(noise(tuple(parameter.shape), generator) if fill else torch.zeros(()))
        placement: Any = (lambda p: Shard(1) if p.ndim > 1 else Shard(0)) if by_columns else None
        fully_shard(model, mesh=self.mesh, shard_placement_fn=placement)
        state: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            state[f"model.{name}"] = parameter.detach()
            for moment, factor in (("exp_avg", 0.1), ("exp_avg_sq", 0.01)):
                state[f"optimizer.{name}.{moment}"] = parameter.detach() * factor
        return state

    def save_turns(self, turns: int) -> Samples:
        """Take turns at saving changed weights."""
        state = self.state()
        ours = self._ours()
        planner = DefaultSavePlanner(enable_plan_caching=True)
        sides: dict[str, Callable[[], None]] = {
            OURS: lambda: _save_ours(ours, self.step, state),
            DCP: lambda: self._save_dcp(state, None),
            DCP_CACHED: lambda: self._save_dcp(state, planner),
        }
        for _ in range(turns):
            self.step += 1
            for side, act in sides.items():
                for tensor in state.values():
                    tensor.to_local().add_(1e-3)
                with together() as taken:
                    act()
                self._note(side, taken)
                self._discard()
        ours.close()
        return self.samples

    def load_turns(self, turns: int, *, cold: bool) -> Samples:
        """Save once with each side, then take turns at loading as saved and by columns."""
        state = self.state()
        ours = self._ours()
        ours.save(0, state)
        self._save_dcp(state, None)
        targets = {_AS_SAVED: self.state(fill=False), _BY_COLUMNS: self.state(by_columns=True, fill=False)}
        for turn in range(turns):
            for what, target in targets.items():
                for side in (OURS, DCP):
                    for tensor in target.values():
                        tensor.to_local().fill_(-1)
                    if cold and dist.get_rank() == 0:
                        evict(self.folder)
                    with together() as taken:
                        taken.counters |= _load_ours(ours, target) if side == OURS else self._load_dcp(target)
                    if turn == 0:
                        _require_same(target, state)
                    taken.counters["bytes_needed"] = _local_bytes(target)
                    self._note(side + what, taken)
        ours.close()
        return self.samples

    def _ours(self) -> vc.Checkpointer:
        return vc.Checkpointer(vc.open_store(self.folder / "ours"), RUN)

    def _save_dcp(self, state: dict[str, Any], planner: DefaultSavePlanner | None) -> None:
        with quiet():
            dcp.save(state, storage_writer=FileSystemWriter(self.folder / "dcp"), planner=planner)

    def _load_dcp(self, target: dict[str, Any]) -> dict[str, float]:
        reader = CountingReader(self.folder / "dcp")
        with quiet():
            dcp.load(target, storage_reader=reader)
        return reader.counters()

    def _note(self, side: str, taken: Measurement) -> None:
        self.samples.setdefault(side, []).append(taken.sample.to_json())

    def _discard(self) -> None:
        """Remove DCP's files and all but the newest of ours; one rank does it for all."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / "dcp", ignore_errors=True)
            with vc.open_store(self.folder / "ours") as store:
                for snapshot in store.snapshots(RUN)[:-1]:
                    store.delete(RUN, snapshot.step)
                store.gc(0)
        dist.barrier()


def _save_ours(checkpointer: vc.Checkpointer, step: int, state: dict[str, Any]) -> None:
    checkpointer.save(step, state).result()


def _load_ours(checkpointer: vc.Checkpointer, target: dict[str, Any]) -> dict[str, float]:
    report = checkpointer.load(target)
    return {
        "bytes_read": report.bytes_read + report.bytes_overhead,
        "bytes_exchanged": report.bytes_exchanged,
        "requests": report.requests,
    }


def _local_bytes(state: dict[str, DTensor]) -> int:
    return sum(tensor.to_local().numel() * tensor.to_local().element_size() for tensor in state.values())


def _require_same(loaded: dict[str, DTensor], saved: dict[str, DTensor]) -> None:
    for name, tensor in saved.items():
        if not torch.equal(loaded[name].full_tensor(), tensor.full_tensor()):
            raise RuntimeError(f"what was loaded differs from what was saved in {name!r}")


QUESTION = Question(
    name="ranks",
    title="Four ranks",
    text=(
        "The same model under FSDP2 on four gloo processes of one thread each. Wall is that of the slowest rank, CPU "
        "the sum over ranks. `as Shard(1)` loads what was saved in rows into a model that FSDP2 cuts by columns."
    ),
    cases=cases,
    run=run,
    columns=("bytes_read", "bytes_needed", "bytes_exchanged", "requests"),
)
