"""How fast does a checkpoint become safetensors?"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import vescale_ckpt as vc
from benchmarks.case import DCP, OURS, Case, Question, against
from benchmarks.measure import measure, settle, stored
from benchmarks.peers import RUN, quiet
from benchmarks.states import blank_like, require_equal, scale_shapes, state_bytes, with_moments
from vescale_ckpt.interop.safetensors import ExportOptions, check_target, export_snapshot, load_hf, plan_export

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample
    from benchmarks.states import State


def cases(scale: Scale) -> Sequence[Case]:
    del scale
    return (
        Case(
            name="weights, tmpfs",
            storage="tmpfs",
            ratios=(
                against("wall / DCP and save_file", "wall_seconds", DCP),
                against("memory / DCP and save_file", "peak_bytes", DCP),
            ),
        ),
    )


def run(case: Case, bench: Bench) -> None:
    del case
    state = with_moments(scale_shapes(bench.scale))
    out, saved = bench.folder / "out", bench.folder / "dcp"
    with vc.open_store(bench.folder / "ours") as store, vc.Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(0, dict(state)).result()
        with quiet():
            dcp.save(dict(state), storage_writer=FileSystemWriter(saved))

        def turn_of(work: Callable[[], None]) -> Callable[[int], Sample]:
            def act(turn: int) -> Sample:
                del turn
                shutil.rmtree(out, ignore_errors=True)
                settle(bench.folder)
                with measure() as taken:
                    work()
                taken.counters |= {"bytes_needed": state_bytes(state), **stored(out)}
                _check(out, state)
                return taken.sample

            return act

        sides = {OURS: turn_of(lambda: _export(store, out))}
        if importlib.util.find_spec("safetensors") is not None:
            sides[DCP] = turn_of(lambda: _load_and_save(state, saved, out))
        else:
            bench.leave_out(DCP, "safetensors is not installed")
        bench.compare(sides)


def _export(store: vc.Store, out: Path) -> None:
    snapshot = store[RUN]
    plan = plan_export(snapshot.manifest, ExportOptions(select="", max_shard_bytes=1 << 40))
    export_snapshot(snapshot, plan, check_target(out))


def _load_and_save(state: State, saved: Path, out: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 -- optional

    loaded = blank_like(state)
    with quiet():
        dcp.load(loaded, storage_reader=FileSystemReader(saved))
    out.mkdir()
    save_file(loaded, out / "model.safetensors")
    with (out / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def _check(out: Path, state: State) -> None:
    """Refuse files that do not hold what was saved."""
    [model] = load_hf(out).values()
    require_equal(model, state)


QUESTION = Question(
    name="export",
    title="Conversion to safetensors",
    text="All tensors of the first question's state, from a checkpoint to one safetensors file, synced.",
    cases=cases,
    run=run,
    columns=("bytes_stored", "peak_bytes"),
)
