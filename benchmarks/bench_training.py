"""How much training time does a background save cost, all in all, while steps go on?"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import vescale_ckpt as vc
from benchmarks.bench_async import PROCESS, THREAD, one_rank_world, save_in_process
from benchmarks.case import OURS, Case, Question, Ratio
from benchmarks.measure import measure, median, settle
from benchmarks.peers import RUN, quiet
from benchmarks.training_model import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample

NO_OVERLAP = f"{OURS}, staged before return"
NONE = "no save"
_BEFORE = 3
_LEAST_AFTER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop(Case):
    """Steps with a save in the middle."""


def cases(scale: Scale) -> Sequence[Loop]:
    del scale
    ratios = tuple(
        Ratio(name=f"training time lost / {side}", of=(OURS, "lost_seconds"), to=(side, "lost_seconds"))
        for side in (THREAD, PROCESS, NO_OVERLAP)
    )
    return (Loop(name="disk", storage="disk", ratios=ratios), Loop(name="tmpfs", storage="tmpfs", ratios=ratios))


def run(case: Loop, bench: Bench) -> None:
    del case
    training = Training(bench.scale)
    training.step()  # makes the moments
    overlapped = vc.Checkpointer(vc.open_store(bench.folder / "ours"), RUN)
    staged = vc.Checkpointer(vc.open_store(bench.folder / "staged"), RUN, options=vc.SaveOptions(overlap_staging=False))
    state = {"model": training.model, "optimizer": training.optimizer}
    with one_rank_world(bench.folder):
        folder = bench.folder / "dcp"

        def for_dcp() -> dict[str, Any]:
            return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}

        sides: dict[str, Callable[[int], Any]] = {
            NONE: lambda _: None,
            OURS: lambda turn: overlapped.save(turn, state, blocking=False),
            NO_OVERLAP: lambda turn: staged.save(turn, state, blocking=False),
            THREAD: lambda _: dcp.async_save(for_dcp(), storage_writer=FileSystemWriter(folder)),
            PROCESS: lambda _: save_in_process(for_dcp(), folder),
        }

        def turn_of(begin: Callable[[int], Any]) -> Callable[[int], Sample]:
            def act(turn: int) -> Sample:
                settle(bench.folder)
                with quiet():
                    sample = _train(training, lambda: begin(turn))
                shutil.rmtree(folder, ignore_errors=True)
                return sample

            return act

        try:
            bench.compare({name: turn_of(begin) for name, begin in sides.items()})
        finally:
            for checkpointer in (overlapped, staged):
                checkpointer.close()
                checkpointer.store.close()


def _train(training: Training, begin: Callable[[], Any]) -> Sample:
    """Do some steps, begin a save, and go on until it has ended and for a few steps; say what it cost."""
    usual = [_timed(training.step) for _ in range(_BEFORE)]
    during: list[float] = []
    with measure(live_children=True) as taken:
        began = time.perf_counter()
        handle = begin()
        call = time.perf_counter() - began
        while (handle is not None and not _done(handle)) or len(during) < _LEAST_AFTER:
            during.append(_timed(training.step))
    if handle is not None:
        handle.result()
    usual += [_timed(training.step) for _ in range(_BEFORE)]
    step = median(usual)
    taken.counters |= {
        "step_seconds": step,
        "call_seconds": call,
        "lost_seconds": call + sum(during) - len(during) * step,
        "slowest_step_seconds": max(during),
        "steps": len(during),
    }
    return taken.sample


def _done(handle: Any) -> bool:
    return bool(handle.done if isinstance(handle, vc.SaveHandle) else handle.done())


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


QUESTION = Question(
    name="training",
    title="Training time lost to a save",
    text=(
        "A GPT trains on noise; a background save begins between two steps, and steps go on until it ends. Lost is "
        "the time of the call and of all steps meanwhile, less so many usual steps. Model and optimizer are given as "
        "objects; what the optimizer owns is staged while forward and backward run. Here training and saving share "
        "the CPUs, so saving's CPU time is lost as well; on accelerators it is not."
    ),
    cases=cases,
    run=run,
    columns=("lost_seconds", "call_seconds", "slowest_step_seconds", "step_seconds", "steps"),
)
