"""How long does a background save hold up its caller, beside one copy of the state's memory?"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import vescale_ckpt as vc
from benchmarks.case import DCP, OURS, Case, Question, Ratio
from benchmarks.measure import measure, settle
from benchmarks.peers import RUN, quiet
from benchmarks.states import blank_like, change, scale_shapes, state_bytes, with_moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample
    from benchmarks.states import State

MEMCPY = "one memcpy"
THREAD, THREAD_KEPT, PROCESS = f"{DCP}, thread", f"{DCP}, thread, staging kept", f"{DCP}, process"


@dataclass(frozen=True, kw_only=True, slots=True)
class Async(Case):
    """Background saves to one kind of storage."""


def cases(scale: Scale) -> Sequence[Async]:
    def stall(side: str, at_most: float | None = None, first: str = "") -> Ratio:
        return Ratio(
            name=f"{first and 'first '}stall / {side}",
            of=(OURS, f"{first}stall_seconds"),
            to=(side, "stall_seconds" if side == MEMCPY else f"{first}stall_seconds"),
            at_most=at_most,
        )

    del scale
    ratios = (
        stall(MEMCPY, 1.1),
        stall(THREAD, 0.3),
        stall(THREAD_KEPT),
        stall(PROCESS, 0.3),
        stall(THREAD, first="first."),
    )
    return (Async(name="disk", storage="disk", ratios=ratios), Async(name="tmpfs", storage="tmpfs", ratios=ratios))


def run(case: Async, bench: Bench) -> None:
    del case
    state = with_moments(scale_shapes(bench.scale))
    copy = blank_like(state)
    ours = vc.Checkpointer(vc.open_store(bench.folder / "ours"), RUN)
    sides: dict[str, Callable[[int], Any]] = {OURS: lambda turn: ours.save(turn, state, blocking=False)}
    with one_rank_world(bench.folder):
        stager = DefaultStager(StagingOptions(False, False, False, False))
        sides |= {
            THREAD: lambda _: dcp.async_save(state, storage_writer=FileSystemWriter(bench.folder / "dcp")),
            THREAD_KEPT: lambda _: dcp.async_save(
                state, storage_writer=FileSystemWriter(bench.folder / "dcp"), async_stager=stager
            ),
            PROCESS: lambda _: save_in_process(state, bench.folder / "dcp"),
        }

        def turn_of(begin: Callable[[int], Any]) -> Callable[[int], Sample]:
            def act(turn: int) -> Sample:
                change(state)
                settle(bench.folder)
                with quiet(), measure(live_children=True) as whole:
                    with measure() as stall:
                        handle = begin(turn)
                    handle.result()
                whole.counters |= {
                    "stall_seconds": stall.sample.wall_seconds,
                    "stall_cpu_seconds": stall.sample.cpu_seconds,
                }
                _discard(ours, turn, bench.folder)
                return whole.sample

            return act

        def copy_once(turn: int) -> Sample:
            del turn
            with measure() as taken:
                for name, tensor in state.items():
                    copy[name].copy_(tensor)
            taken.counters |= {
                "stall_seconds": taken.sample.wall_seconds,
                "stall_cpu_seconds": taken.sample.cpu_seconds,
            }
            return taken.sample

        try:
            bench.compare({MEMCPY: copy_once, **{name: turn_of(begin) for name, begin in sides.items()}})
        finally:
            ours.close()
            ours.store.close()
    bench.note(f"the state has {state_bytes(state):,} bytes in {len(state):,} tensors")


@contextmanager
def one_rank_world(folder: Path) -> Iterator[None]:
    """Make this process a world of one rank, which DCP's background processes need."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where those meet; the host's own name may lead nowhere
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_in_process(state: State | dict[str, Any], folder: Path) -> Future[Any]:
    """Begin a save in DCP's background process, which is started by the first and kept."""
    future: Any = dcp.async_save(
        state, storage_writer=FileSystemWriter(folder), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    return future


def _discard(ours: vc.Checkpointer, turn: int, folder: Path) -> None:
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    if turn and len(found := ours.store.snapshots(RUN)) > 1:
        for snapshot in found[:-1]:
            ours.store.delete(RUN, snapshot.step)
        ours.store.gc(0)


QUESTION = Question(
    name="async",
    title="Stall of a background save",
    text=(
        "Stall is how long the call that begins a save holds its caller; the state may be changed after it. Wall and "
        "CPU go on until the save is durable. The state is the dict of the first question, so all of it is staged "
        "before the call returns; what an optimizer owns need not be (see the next question). `one memcpy` copies the "
        "same tensors into memory that was touched before."
    ),
    cases=cases,
    run=run,
    columns=("stall_seconds", "first.stall_seconds", "stall_cpu_seconds", "first.peak_bytes"),
)
