"""Do ranks that need the same bytes load faster together or each for itself, and does the cost model know?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import vescale_ckpt as vc
from benchmarks.bench_reshard import shapes_of
from benchmarks.case import OURS, Case, Question, Ratio
from benchmarks.peers import RUN
from benchmarks.states import noise
from benchmarks.worlds import Samples, launch, over_ranks, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample

TOGETHER, EACH = f"{OURS}, exchanged", f"{OURS}, each for itself"
SHARES = vc.ReadCost(link_bytes_per_second=math.inf)
READS = vc.ReadCost(rank_bytes_per_second=1e18, storage_bytes_per_second=math.inf, link_bytes_per_second=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies(Case):
    """A state that every rank holds whole."""


def cases(scale: Scale) -> Sequence[Copies]:
    del scale
    return tuple(
        Copies(
            name=f"{num_ranks} copies",
            storage="tmpfs",
            world_size=num_ranks,
            ratios=(
                Ratio(name="wall by the model / exchanged", of=(OURS, "wall_seconds"), to=(TOGETHER, "wall_seconds")),
                Ratio(name="wall by the model / each", of=(OURS, "wall_seconds"), to=(EACH, "wall_seconds")),
                Ratio(
                    name="bytes read, exchanged / needed",
                    of=(TOGETHER, "bytes_read"),
                    to=(TOGETHER, "bytes_needed"),
                    at_most=1.05,
                    exact=True,
                ),
            ),
        )
        for num_ranks in (2, 4)
    )


def run(case: Copies, bench: Bench) -> None:
    returned = launch(
        rank_body,
        case.world_size,
        deadline_seconds=case.deadline_seconds,
        folder=str(bench.folder),
        shapes=shapes_of(bench.scale.reshard_bytes),
        turns=1 + bench.repeats,
    )
    for side, samples in over_ranks(returned).items():
        bench.add(side, samples[0], first=True)
        for sample in samples[1:]:
            bench.add(side, sample)


def rank_body(folder: str, shapes: dict[str, list[int]], turns: int) -> Samples:
    """Be one rank: load the same state in both ways, and by what a model makes of the first turn of each."""
    generator = torch.Generator().manual_seed(0)
    full = {name: noise(tuple(shape), generator) for name, shape in shapes.items()}
    store = vc.open_store(Path(folder) / "store")
    with vc.Checkpointer(store, RUN) as ours:
        ours.save(0, full).result()
    needed = sum(tensor.nbytes for tensor in full.values())
    samples: Samples = {OURS: [], TOGETHER: [], EACH: []}
    model = vc.ReadCost()
    for turn in range(turns):
        taken = {side: _load(store, full, cost) for side, cost in ((TOGETHER, SHARES), (EACH, READS))}
        if turn == 0:
            model = _model_of(taken[TOGETHER].wall_seconds, taken[EACH].wall_seconds, needed)
        taken[OURS] = _load(store, full, model)
        for side, sample in taken.items():
            sample.counters["bytes_needed"] = needed if dist.get_rank() == 0 else 0  # each byte once
            samples[side].append(sample.to_json())
    return samples


def _load(store: vc.Store, full: dict[str, torch.Tensor], cost: vc.ReadCost) -> Sample:
    target = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    with vc.Checkpointer(store, RUN, read_options=vc.ReadOptions(cost=cost)) as ours:
        with together() as taken:
            report = ours.load(target)
        taken.counters |= {"bytes_read": report.bytes_read, "bytes_exchanged": report.bytes_exchanged}
    if not all(torch.equal(target[name], tensor) for name, tensor in full.items()):
        raise RuntimeError("what was loaded differs from what was saved")
    return taken.sample


def _model_of(shared_seconds: float, direct_seconds: float, num_bytes: int) -> vc.ReadCost:
    """Return what rates explain the two ways on this machine, memory being as fast for each rank as for one."""
    rate, part = num_bytes / direct_seconds, 1 / dist.get_world_size()
    on_links = max(shared_seconds - part * direct_seconds, 1e-9)
    return vc.ReadCost(
        rank_bytes_per_second=rate,
        storage_bytes_per_second=math.inf,
        link_bytes_per_second=(1 - part) * num_bytes / on_links,
    )


QUESTION = Question(
    name="copies",
    title="Ranks that need the same bytes",
    text=(
        "A state that every rank loads whole, from memory: each rank reads and verifies all of it, or each a part, "
        "and the parts are exchanged over gloo. The third side asks the cost model (`ReadCost`) with the rates of the "
        "first turn of the two, which is what a site would measure once for its storage and links."
    ),
    cases=cases,
    run=run,
    columns=("bytes_read", "bytes_needed", "bytes_exchanged"),
)
