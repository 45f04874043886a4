"""How many bytes are written for states that have content in common?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import vescale_ckpt as vc
from benchmarks.bench_reshard import shapes_of
from benchmarks.case import DCP, OURS, Case, Question, Ratio
from benchmarks.layouts import Spread
from benchmarks.measure import Sample, measure, stored
from benchmarks.peers import RUN, quiet
from benchmarks.states import noise, state_bytes
from benchmarks.worlds import launch, together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale

_FROZEN_ROWS = 1024
"""Of 1,024 float32: 4 MiB."""
_LAYOUTS = ("4 S0", "4 S1", "2x2 S0,S1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dedup(Case):
    """Some saves in a row."""

    what: str


def cases(scale: Scale) -> Sequence[Dedup]:
    def ratios(at_most: float | None) -> tuple[Ratio, ...]:
        ours = Ratio(
            name="bytes stored / distinct bytes",
            of=(OURS, "bytes_stored"),
            to=(OURS, "bytes_needed"),
            at_most=at_most,
            exact=True,
        )
        theirs = Ratio(
            name="bytes stored / distinct bytes, DCP", of=(DCP, "bytes_stored"), to=(DCP, "bytes_needed"), exact=True
        )
        return (ours, theirs)

    del scale
    small = {"repeats": 1, "storage": "tmpfs"}
    return (
        Dedup(name="frozen 4 MiB and adapter of 1 KiB, 3 saves", what="frozen", ratios=ratios(1.0125), **small),
        Dedup(name="tied weights", what="tied", ratios=ratios(1.01), **small),
        Dedup(name="EMA that is still the model", what="ema", ratios=ratios(1.01), **small),
        Dedup(name="EMA after a step", what="ema_after", ratios=ratios(1.01), **small),
        Dedup(
            name=f"one state from {len(_LAYOUTS)} layouts", what="relayout", world_size=4, ratios=ratios(1.02), **small
        ),
    )


def run(case: Dedup, bench: Bench) -> None:
    if case.what == "relayout":
        _relayout(case, bench)
        return
    states, distinct = _STATES[case.what]()
    folder = bench.folder
    with vc.open_store(folder / "ours") as store, vc.Checkpointer(store, RUN) as ours, measure() as taken:
        for step, state in enumerate(states):
            ours.save(step, state).result()
    taken.counters |= {"bytes_needed": distinct, **stored(folder / "ours")}
    bench.add(OURS, taken.sample)
    with quiet(), measure() as taken:
        for step, state in enumerate(states):
            dcp.save(dict(state), storage_writer=FileSystemWriter(folder / "dcp" / str(step)))
    taken.counters |= {"bytes_needed": distinct, **stored(folder / "dcp")}
    bench.add(DCP, taken.sample)


def _frozen() -> tuple[list[dict[str, torch.Tensor]], int]:
    generator = torch.Generator().manual_seed(0)
    frozen = torch.randn(_FROZEN_ROWS, 1024, generator=generator)
    adapters = [torch.randn(256, generator=generator) for _ in range(3)]
    states = [{"frozen": frozen, "adapter": adapter} for adapter in adapters]
    return states, state_bytes({"frozen": frozen}) + sum(state_bytes({"a": adapter}) for adapter in adapters)


def _tied() -> tuple[list[dict[str, torch.Tensor]], int]:
    weight = torch.randn(_FROZEN_ROWS, 1024, generator=torch.Generator().manual_seed(0))
    return [{"embedding": weight, "head": weight}], state_bytes({"w": weight})


def _ema() -> tuple[list[dict[str, torch.Tensor]], int]:
    weight = torch.randn(_FROZEN_ROWS, 1024, generator=torch.Generator().manual_seed(0))
    return [{"model": weight, "ema": weight.clone()}], state_bytes({"w": weight})


def _ema_after() -> tuple[list[dict[str, torch.Tensor]], int]:
    [state], size = _ema()
    return [state, {"model": state["model"] + 0.1, "ema": state["ema"] + 0.01}], 3 * size


_STATES: dict[str, Callable[[], tuple[list[dict[str, torch.Tensor]], int]]] = {
    "frozen": _frozen,
    "tied": _tied,
    "ema": _ema,
    "ema_after": _ema_after,
}


def _relayout(case: Dedup, bench: Bench) -> None:
    shapes = shapes_of(min(bench.scale.reshard_bytes, 32 << 20))
    returned = launch(rank_body, 4, deadline_seconds=case.deadline_seconds, folder=str(bench.folder), shapes=shapes)
    for side, folder in ((OURS, "ours"), (DCP, "dcp")):
        sample = Sample.over_ranks([Sample.from_json(rank[side]) for rank in returned])
        sample.counters.update(stored(bench.folder / folder))
        bench.add(side, sample)


def rank_body(folder: str, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Be one rank: save one state from one layout after another."""
    generator = torch.Generator().manual_seed(0)
    full = {name: noise(tuple(shape), generator) for name, shape in shapes.items()}
    rank, place = dist.get_rank(), Path(folder)
    states = [{n: Spread.parse(layout).dtensor(t, rank) for n, t in full.items()} for layout in _LAYOUTS]
    with vc.open_store(place / "ours") as store, vc.Checkpointer(store, RUN) as ours, together() as taken:
        for step, state in enumerate(states):
            ours.save(step, state).result()
    found = {OURS: taken}
    with quiet(), together() as taken:
        for step, state in enumerate(states):
            dcp.save(state, storage_writer=FileSystemWriter(place / "dcp" / str(step)))
    found[DCP] = taken
    for measured in found.values():
        measured.counters["bytes_needed"] = state_bytes(full) if rank == 0 else 0
    return {side: measured.sample.to_json() for side, measured in found.items()}


QUESTION = Question(
    name="dedup",
    title="Bytes written for content in common",
    text=(
        "All that lies in storage after the saves, metadata included, over the bytes that differ. Weights that an "
        "optimizer changed share nothing with the step before, here or anywhere (the last EMA row)."
    ),
    cases=cases,
    run=run,
    columns=("bytes_stored", "bytes_needed", "files"),
    timed=False,
)
