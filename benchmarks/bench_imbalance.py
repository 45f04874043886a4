"""How evenly do ranks that hold copies share the writing?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import vescale_ckpt as vc
from benchmarks.case import DCP, OURS, Case, Question, Ratio
from benchmarks.layouts import Spread
from benchmarks.measure import Sample
from benchmarks.peers import RUN, quiet
from benchmarks.worlds import launch, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale

_LARGE = (4096, 1024)
_SMALL = (64, 1024)
_NUM_SMALL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance(Case):
    """One large and eight small tensors on some ranks."""

    layout: str


def cases(scale: Scale) -> Sequence[Imbalance]:
    del scale

    def ratio(side: str, at_most: float | None) -> Ratio:
        return Ratio(
            name=f"most bytes of a rank / mean, {side}",
            of=(side, "most_bytes"),
            to=(side, "mean_bytes"),
            at_most=at_most,
            exact=True,
        )

    return tuple(
        Imbalance(
            name=name,
            layout=layout,
            storage="tmpfs",
            world_size=4,
            repeats=1,
            ratios=(ratio(OURS, 1.1), ratio(DCP, None)),
        )
        for name, layout in (("4 copies", "4 R"), ("2 copies of 2 shards", "2x2 R,S0"))
    )


def run(case: Imbalance, bench: Bench) -> None:
    returned = launch(
        rank_body, 4, deadline_seconds=case.deadline_seconds, folder=str(bench.folder), layout=case.layout
    )
    for side in (OURS, DCP):
        samples = [Sample.from_json(rank[side]) for rank in returned]
        written = [sample.counters["bytes_written"] for sample in samples]
        merged = Sample.over_ranks(samples)
        merged.counters.update(most_bytes=max(written), mean_bytes=sum(written) / len(written))
        bench.add(side, merged)


def rank_body(folder: str, layout: str) -> dict[str, Any]:
    """Be one rank: save with each side and say how many bytes this rank wrote."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": _LARGE, **{f"small.{i}": _SMALL for i in range(_NUM_SMALL)}}
    rank, place, spread = dist.get_rank(), Path(folder), Spread.parse(layout)
    state = {name: spread.dtensor(torch.randn(shape, generator=generator), rank) for name, shape in shapes.items()}
    with vc.open_store(place / "ours") as store, vc.Checkpointer(store, RUN) as ours, together() as taken:
        taken.counters["bytes_written"] = ours.save(0, state).result().bytes_written
    found = {OURS: taken.sample.to_json()}
    with quiet(), together() as taken:
        dcp.save(state, storage_writer=FileSystemWriter(place / "dcp"))
    taken.counters["bytes_written"] = sum(p.stat().st_size for p in (place / "dcp").glob(f"__{rank}_*.distcp"))
    found[DCP] = taken.sample.to_json()
    return found


QUESTION = Question(
    name="imbalance",
    title="Balance of the writers",
    text="A matrix of 16 MiB and eight of 256 KiB, of which several ranks hold copies; bytes that each rank wrote.",
    cases=cases,
    run=run,
    columns=("most_bytes", "mean_bytes"),
    timed=False,
)
