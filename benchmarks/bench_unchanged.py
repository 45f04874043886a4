"""What does it cost to save a state again that did not change?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.case import DCP, OURS, Case, Question, Ratio, against
from benchmarks.one_process import compare_saves
from benchmarks.states import scale_shapes, with_moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale


def cases(scale: Scale) -> Sequence[Case]:
    del scale
    written = Ratio(
        name="bytes written / bytes of the state",
        of=(OURS, "bytes_written"),
        to=(OURS, "bytes_needed"),
        at_most=0.001,
        exact=True,
    )
    return tuple(
        Case(name=storage, storage=storage, ratios=(against("wall / DCP", "wall_seconds", DCP, 0.2), written))
        for storage in ("disk", "tmpfs")
    )


def run(case: Case, bench: Bench) -> None:
    del case
    compare_saves(bench, with_moments(scale_shapes(bench.scale)), [peers.Ours(), peers.Dcp()], unchanged=True)


QUESTION = Question(
    name="unchanged",
    title="An unchanged state, saved again",
    text="The state of the question before, saved once and then again as it is. Ours hashes it and finds all of it.",
    cases=cases,
    run=run,
    columns=("bytes_written", "bytes_deduplicated", "requests"),
)
