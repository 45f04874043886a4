"""How many bytes does storage give for the bytes that a load on another layout needs?"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import vescale_ckpt as vc
from benchmarks.case import DCP, OURS, Case, Question, Ratio, against
from benchmarks.layouts import Spread
from benchmarks.peers import RUN, CountingReader, quiet
from benchmarks.states import noise
from benchmarks.worlds import Samples, launch, over_ranks, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor import DTensor

    from benchmarks.bench import Bench
    from benchmarks.case import Scale

PAIRS = (
    ("4 S0", "4 S0"),
    ("4 S0", "4 S1"),
    ("4 S0", "8 S1"),
    ("4 S0", "4 R"),
    ("4 S0", "3 S0"),
    ("4 S0", "1 R"),
    ("4 S1", "4 S0"),
    ("2x2 S0,S1", "4 S0"),
    ("2x2 R,S0", "2x4 S0,S1"),
    ("2x4 T0/4,S0", "3 S1"),
)
"""(saved by, loaded on): same, rows to columns, more ranks, to copies, uneven, to one rank, columns to rows, from a
grid, from copies to a grid, from FSDP within TP to an odd number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshard(Case):
    """A state that goes from one layout to another."""

    saved_by: str
    loaded_on: str


def cases(scale: Scale) -> Sequence[Reshard]:
    del scale
    return tuple(
        Reshard(
            name=f"{source} to {target}",
            saved_by=source,
            loaded_on=target,
            storage="tmpfs",
            world_size=max(Spread.parse(source).world_size, Spread.parse(target).world_size),
            ratios=(
                Ratio(
                    name="bytes read / needed",
                    of=(OURS, "bytes_read"),
                    to=(OURS, "bytes_needed"),
                    at_most=1.05,
                    exact=True,
                ),
                Ratio(name="bytes read / needed, DCP", of=(DCP, "bytes_read"), to=(DCP, "bytes_needed"), exact=True),
                against("load CPU / DCP", "cpu_seconds", DCP),
            ),
        )
        for source, target in PAIRS
    )


def run(case: Reshard, bench: Bench) -> None:
    pair = [[str(bench.folder / "0"), case.saved_by, case.loaded_on]]
    for side, samples in run_pairs(pair, bench, case.world_size, case.deadline_seconds)[0].items():
        bench.add(side, samples[0], first=True)
        for sample in samples[1:]:
            bench.add(side, sample)


def run_pairs(pairs: list[list[str]], bench: Bench, world_size: int, deadline_seconds: float) -> list[dict[str, Any]]:
    """Return side -> samples of each (folder, saved by, loaded on), all done by one world."""
    returned = launch(
        rank_body,
        world_size,
        deadline_seconds=deadline_seconds,
        pairs=pairs,
        shapes=shapes_of(bench.scale.reshard_bytes),
        turns=1 + bench.repeats,
    )
    return [over_ranks(of_ranks) for of_ranks in zip(*returned, strict=True)]


def shapes_of(num_bytes: int) -> dict[str, list[int]]:
    """Return the shapes of a few layers that come to about so many bytes of float32."""
    width = max(64, 16 * round(math.sqrt(num_bytes / 4 / 12 / 4) / 16))
    layer = {"attn": [3 * width, width], "proj": [width, width], "fc": [4 * width, width], "out": [width, 4 * width]}
    return {f"h.{i}.{name}": shape for i in range(4) for name, shape in layer.items()}


def rank_body(pairs: list[list[str]], shapes: dict[str, list[int]], turns: int) -> list[Samples]:
    """Be one rank: save and load every pair with each side, on as many ranks as its layouts have."""
    generator = torch.Generator().manual_seed(0)
    full = {name: noise(tuple(shape), generator) for name, shape in shapes.items()}
    return [_one(Path(folder), Spread.parse(a), Spread.parse(b), full, turns) for folder, a, b in pairs]


def _one(folder: Path, saved_by: Spread, loaded_on: Spread, full: dict[str, torch.Tensor], turns: int) -> Samples:
    rank = dist.get_rank()
    savers, loaders = (dist.new_group(list(range(spread.world_size))) for spread in (saved_by, loaded_on))
    for spread in (saved_by, loaded_on):
        spread.device_mesh()
    state = _laid_out(full, saved_by)
    if rank < saved_by.world_size:
        with vc.open_store(folder / "ours") as store, vc.Checkpointer(store, RUN, process_group=savers) as ours:
            ours.save(0, state).result()
        with quiet():
            dcp.save(state, storage_writer=FileSystemWriter(folder / "dcp"), process_group=savers)
    dist.barrier()
    del state
    # Every element once, whoever wants it: what one reader that shares with all others would have to read.
    needed = sum(t.numel() * t.element_size() for t in full.values()) if rank == 0 else 0
    samples: Samples = {OURS: [], DCP: []}
    for _ in range(turns):
        for side in (OURS, DCP):
            target = _laid_out({name: torch.zeros_like(t) for name, t in full.items()}, loaded_on)
            with together() as taken:
                if rank < loaded_on.world_size:
                    load = _load_ours if side == OURS else _load_dcp
                    taken.counters |= load(folder, target, loaders)
            _check(target, full, loaded_on)
            taken.counters["bytes_needed"] = needed
            samples[side].append(taken.sample.to_json())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return samples


def _laid_out(full: dict[str, torch.Tensor], spread: Spread) -> dict[str, Any]:
    rank = dist.get_rank()
    return {name: spread.dtensor(t, rank) for name, t in full.items()} if rank < spread.world_size else {}


def _load_ours(folder: Path, target: dict[str, Any], group: Any) -> dict[str, float]:
    with vc.open_store(folder / "ours") as store:
        with vc.Checkpointer(store, RUN, process_group=group) as ours:
            report = ours.load(target)
        counts = store.counts
        assert counts is not None, "the store does not count"  # noqa: S101 -- a mistake of the benchmark
        return {
            "bytes_read": counts.down_bytes,
            "requests": counts.num_requests,
            "bytes_exchanged": report.bytes_exchanged,
        }


def _load_dcp(folder: Path, target: dict[str, Any], group: Any) -> dict[str, float]:
    reader = CountingReader(folder / "dcp")
    with quiet():
        dcp.load(target, storage_reader=reader, process_group=group)
    return reader.counters()


def _check(target: dict[str, DTensor], full: dict[str, torch.Tensor], spread: Spread) -> None:
    for name, expected in _laid_out(full, spread).items():
        if not torch.equal(target[name].to_local(), expected.to_local()):
            raise RuntimeError(f"what was loaded on {spread} differs from what was saved in {name!r}")


QUESTION = Question(
    name="reshard",
    title="Loading on another layout",
    text=(
        "Ten pairs of layouts, `mesh cuts`: `S0` cuts by rows, `S1` by columns, `R` keeps copies, `T0/4` is FSDP in "
        "4-way tensor parallelism. Needed is every byte of the state once. Ours counts all that storage gave on all "
        "ranks, manifest and footers included; ranks that need the same bytes exchange them. DCP counts what its "
        "reader read from files."
    ),
    cases=cases,
    run=run,
    columns=("bytes_read", "bytes_needed", "bytes_exchanged", "requests"),
)
