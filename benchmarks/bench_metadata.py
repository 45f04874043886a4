"""How many bytes of metadata does a chunk cost?"""

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
from benchmarks.measure import Sample, stored
from benchmarks.peers import RUN, quiet
from benchmarks.worlds import launch, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale

_RANKS = 4
_ROWS, _WIDTH = 512, 1024
"""2 MiB of float32: as many chunks of ours as 8 ranks have shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata(Case):
    """So many tensors on four ranks."""

    num_tensors: int


def cases(scale: Scale) -> Sequence[Metadata]:
    def ratio(name: str, side: str, quantity: str, at_most: float | None) -> Ratio:
        return Ratio(
            name=f"{name} a chunk, {side}", of=(side, quantity), to=(side, "chunks"), at_most=at_most, exact=True
        )

    ratios = (
        ratio("manifest bytes", OURS, "manifest_bytes", 64.0),
        ratio("manifest bytes", DCP, "manifest_bytes", None),
        ratio("all bytes but payload", OURS, "overhead_bytes", None),
        ratio("all bytes but payload", DCP, "overhead_bytes", None),
    )
    return tuple(
        Metadata(
            name=f"{count} tensors", num_tensors=count, storage="tmpfs", world_size=_RANKS, repeats=1, ratios=ratios
        )
        for count in ((4,) if scale.name == "tiny" else (50, 200))
    )


def run(case: Metadata, bench: Bench) -> None:
    returned = launch(
        rank_body,
        _RANKS,
        deadline_seconds=case.deadline_seconds,
        folder=str(bench.folder),
        num_tensors=case.num_tensors,
    )
    payload = case.num_tensors * _ROWS * _WIDTH * 4
    for side, folder, manifests in ((OURS, "ours", "manifests/*/*"), (DCP, "dcp", ".metadata")):
        place = bench.folder / folder
        sample = Sample.over_ranks([Sample.from_json(rank[side]) for rank in returned])
        sample.counters.update(stored(place))
        sample.counters["manifest_bytes"] = sum(path.stat().st_size for path in place.glob(manifests))
        sample.counters["overhead_bytes"] = sample.counters["bytes_stored"] - payload
        bench.add(side, sample)


def rank_body(folder: str, num_tensors: int) -> dict[str, Any]:
    """Be one rank: save tensors cut by rows with each side."""
    rank, place, spread = dist.get_rank(), Path(folder), Spread.parse(f"{_RANKS} S0")
    generator = torch.Generator().manual_seed(0)
    state = {
        f"model.layers.{i}.mlp.weight": spread.dtensor(torch.randn(_ROWS, _WIDTH, generator=generator), rank)
        for i in range(num_tensors)
    }
    with vc.open_store(place / "ours") as store, vc.Checkpointer(store, RUN) as ours, together() as taken:
        taken.counters["chunks"] = ours.save(0, state).result().chunks
    found = {OURS: taken.sample.to_json()}
    with quiet(), together() as taken:
        dcp.save(state, storage_writer=FileSystemWriter(place / "dcp"))
    taken.counters["chunks"] = num_tensors
    found[DCP] = taken.sample.to_json()
    return found


QUESTION = Question(
    name="metadata",
    title="Metadata",
    text=(
        "Matrices of 2 MiB, cut by rows over four ranks. A chunk is what is stored and read as one: a tile of ours, a "
        "rank's shard of DCP's. All but payload counts whatever else lies in storage: footers, record headers, padding."
    ),
    cases=cases,
    run=run,
    columns=("chunks", "manifest_bytes", "overhead_bytes", "bytes_stored"),
    timed=False,
)
