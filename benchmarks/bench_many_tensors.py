"""What does a tensor cost, apart from its bytes? Thousands of small ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks import peers
from benchmarks.case import DCP, Case, Question, against
from benchmarks.one_process import compare_loads, compare_saves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale

_ITEMS = 1024
"""Of float32: 4 KiB a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Many(Case):
    """A save or a load of so many tensors."""

    saves: bool
    num_tensors: int


def cases(scale: Scale) -> Sequence[Many]:
    found = []
    counts = sorted({max(1, scale.num_small // divisor) for divisor in (1, 4, 20)})
    for saves in (True, False):
        verb = "save" if saves else "load, warm"
        for count in counts:
            ratios = (against(f"{verb} wall / DCP", "wall_seconds", DCP),) if count == counts[-1] else ()
            found.append(
                Many(
                    name=f"{verb}, {count}",
                    storage="tmpfs",
                    saves=saves,
                    num_tensors=count,
                    ratios=ratios,
                    sweep=("tensors", count),
                    curve=verb.partition(",")[0],
                )
            )
    return tuple(found)


def run(case: Many, bench: Bench) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"h.{i}.weight": torch.randn(_ITEMS, generator=generator) for i in range(case.num_tensors)}
    if case.saves:
        compare_saves(bench, state, peers.savers(durable_only=True))
    else:
        compare_loads(bench, state, peers.loaders())


QUESTION = Question(
    name="many_tensors",
    title="Many small tensors",
    text="Tensors of 4 KiB in memory-backed files: what is left is the cost of a tensor.",
    cases=cases,
    run=run,
    columns=("bytes_stored", "files", "requests"),
)
