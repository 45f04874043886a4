"""How fast does one process save and load a model with its optimizer, beside others and beside the bare file?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.case import DCP, OURS, Case, Question, Ratio, against
from benchmarks.one_process import compare_loads, compare_saves
from benchmarks.states import scale_shapes, with_moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveLoad(Case):
    """A save or a load on one kind of storage."""

    saves: bool
    cold: bool = False


def cases(scale: Scale) -> Sequence[SaveLoad]:
    del scale
    raw = Ratio(
        name="save wall / raw write and fsync",
        of=(OURS, "wall_seconds"),
        to=("raw file", "wall_seconds"),
        at_most=1 / 0.85,
    )
    return (
        SaveLoad(
            name="save, disk", storage="disk", saves=True, ratios=(raw, against("save wall / DCP", "wall_seconds", DCP))
        ),
        SaveLoad(
            name="save, tmpfs",
            storage="tmpfs",
            saves=True,
            ratios=(
                against("save wall / DCP", "wall_seconds", DCP, 0.7),
                against("save CPU / DCP", "cpu_seconds", DCP, 1.2),
            ),
        ),
        SaveLoad(
            name="load, disk, cold",
            storage="disk",
            saves=False,
            cold=True,
            ratios=(against("cold load wall / DCP", "wall_seconds", DCP, 0.6),),
        ),
        SaveLoad(
            name="load, disk, warm",
            storage="disk",
            saves=False,
            ratios=(
                against("warm load wall / DCP", "wall_seconds", DCP, 0.5),
                against("warm load CPU / DCP", "cpu_seconds", DCP),
            ),
        ),
        SaveLoad(
            name="load, tmpfs",
            storage="tmpfs",
            saves=False,
            ratios=(against("load wall / DCP", "wall_seconds", DCP, 0.5),),
        ),
    )


def run(case: SaveLoad, bench: Bench) -> None:
    state = with_moments(scale_shapes(bench.scale))
    if case.saves:
        compare_saves(bench, state, peers.savers(durable_only=case.storage == "tmpfs"))
    else:
        compare_loads(bench, state, peers.loaders(), cold=case.cold)


QUESTION = Question(
    name="save_load",
    title="Save and load, one process",
    text=(
        "A GPT of GPT-2 medium's width with Adam's moments, as a dict of float32 tensors that every side takes as it "
        "is. Each side saves changed weights again and again as training does (the first save of a process is kept "
        "apart), and loads into tensors that exist. All saves end in `fsync` but for those that say so; ours hashes "
        "every byte and verifies every byte that it loads, which no other side does."
    ),
    cases=cases,
    run=run,
    columns=("bytes_stored", "files", "requests", "disk_read_bytes", "first.peak_bytes"),
)
