"""How much host memory does a save or a load need beyond the state itself?"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import vescale_ckpt as vc
from benchmarks import peers
from benchmarks.case import DCP, OURS, Case, Question, Ratio
from benchmarks.measure import Sample, measure
from benchmarks.peers import quiet
from benchmarks.states import change, scale_shapes, state_bytes, with_moments
from benchmarks.worlds import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale

BUDGET_BYTES = 256 << 20
_SMALL_BUDGET_BYTES = 32 << 20
_BUDGETED = f"{OURS}, budget"
_NUM_SAVES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Case):
    """One way to save or load."""

    what: str


def cases(scale: Scale) -> Sequence[Memory]:
    del scale
    budget = Ratio(
        name="growth / stated budget", of=(_BUDGETED, "peak_bytes"), to=(_BUDGETED, "budget_bytes"), at_most=1.1
    )

    def growth(side: str) -> Ratio:
        return Ratio(name=f"growth / state, {side}", of=(side, "peak_bytes"), to=(side, "bytes_needed"))

    return (
        Memory(name="save", what="save", storage="disk", ratios=(growth(OURS), growth(DCP), budget), repeats=1),
        Memory(
            name="background save", what="async", storage="disk", ratios=(growth(OURS), growth(DCP), budget), repeats=1
        ),
        Memory(name="load", what="load", storage="disk", ratios=(growth(OURS), growth(DCP)), repeats=1),
    )


def run(case: Memory, bench: Bench) -> None:
    budget_bytes = BUDGET_BYTES if bench.scale.state_bytes > 2 * BUDGET_BYTES else _SMALL_BUDGET_BYTES
    sides = [OURS, DCP] if case.what == "load" else [OURS, _BUDGETED, DCP]
    for side in sides:  # each in a process of its own: memory that one has had is not new to the next
        for _ in range(bench.repeats):
            folder = bench.empty("work")
            [sample] = launch(
                process_body,
                1,
                deadline_seconds=case.deadline_seconds,
                folder=str(folder),
                shapes=list(scale_shapes(bench.scale).items()),
                side=side,
                what=case.what,
                budget_bytes=budget_bytes,
            )
            bench.add(side, Sample.from_json(sample))
            shutil.rmtree(folder)


def process_body(folder: str, shapes: list[Any], side: str, what: str, budget_bytes: int) -> dict[str, Any]:
    """Save or load a few times in this process; return what all of that took."""
    state = with_moments({name: tuple(shape) for name, shape in shapes})
    place = Path(folder)
    options = vc.SaveOptions(host_budget_bytes=budget_bytes) if side == _BUDGETED else None
    ours = peers.Ours(options=options)
    saver = ours if side.startswith(OURS) else peers.Dcp()
    if what == "load":
        saver.save(state, place)
    with measure() as taken:
        for turn in range(_NUM_SAVES):
            if what == "load":
                saver.load(state, place)
                continue
            change(state)
            if what == "save":
                saver.save(state, place)
            else:
                _begin(side, ours, turn, place)(state).result()
    taken.counters |= {"bytes_needed": state_bytes(state), "budget_bytes": budget_bytes}
    ours.close()
    return taken.sample.to_json()


def _begin(side: str, ours: peers.Ours, turn: int, folder: Path) -> Callable[[Any], Any]:
    if side.startswith(OURS):
        return lambda state: ours.checkpointer(folder).save(turn, dict(state), blocking=False)

    def begin(state: Any) -> Any:
        with quiet():
            return dcp.async_save(state, storage_writer=FileSystemWriter(folder))

    return begin


QUESTION = Question(
    name="memory",
    title="Host memory beyond the state",
    text=(
        "Growth of the resident set over three saves or loads in a row, each side in a process of its own that holds "
        "the state already. With a budget, our saves stage and write within it; without one, a background save copies "
        "the whole state first, as DCP's does."
    ),
    cases=cases,
    run=run,
    columns=("peak_bytes", "bytes_needed", "budget_bytes"),
    timed=False,
)
