"""What does a byte cost? One large tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks import peers
from benchmarks.case import DCP, Case, Question, against
from benchmarks.one_process import compare_loads, compare_saves
from benchmarks.states import noise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale

_WIDTH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class One(Case):
    """A save or a load of one tensor."""

    saves: bool
    rows: int
    """Of 1,024 float32."""


def cases(scale: Scale) -> Sequence[One]:
    found = []
    sizes = sorted({max(1, scale.state_bytes // (4 * _WIDTH * divisor)) for divisor in (1, 4, 16)})
    for saves in (True, False):
        verb = "save" if saves else "load, warm"
        for rows in sizes:
            num_bytes = rows * 4 * _WIDTH
            ratios = (against(f"{verb} wall / DCP", "wall_seconds", DCP),) if rows == sizes[-1] else ()
            found.append(
                One(
                    name=f"{verb}, {num_bytes / 1e6:.3g} MB",
                    storage="tmpfs",
                    saves=saves,
                    rows=rows,
                    ratios=ratios,
                    sweep=("bytes", num_bytes),
                    curve=verb.partition(",")[0],
                )
            )
    return tuple(found)


def run(case: One, bench: Bench) -> None:
    state = {"weight": noise((case.rows, _WIDTH), torch.Generator().manual_seed(0))}
    if case.saves:
        compare_saves(bench, state, peers.savers(durable_only=True))
    else:
        compare_loads(bench, state, peers.loaders())


QUESTION = Question(
    name="one_tensor",
    title="One large tensor",
    text="One matrix in memory-backed files: what is left is the cost of a byte.",
    cases=cases,
    run=run,
    columns=("bytes_stored", "requests", "first.peak_bytes"),
)
