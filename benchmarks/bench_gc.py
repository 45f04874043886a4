"""What do many snapshots in one store cost: a save, a look at the newest, a collection?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import vescale_ckpt as vc
from benchmarks.case import Case, Question
from benchmarks.measure import measure, stored
from benchmarks.peers import RUN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample

SAVE, NEWEST, PLAN, COLLECT = "one more save", "open and read the newest", "plan of a collection", "collect half"
_NUM_TENSORS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshots(Case):
    """A store of so many snapshots."""

    num_snapshots: int


def cases(scale: Scale) -> Sequence[Snapshots]:
    counts = sorted({max(2, scale.num_snapshots // 4**i) for i in range(3)})
    return tuple(
        Snapshots(
            name=f"{count:,} snapshots",
            num_snapshots=count,
            storage="tmpfs",
            sweep=("snapshots", count),
            curve="store",
            repeats=1,
        )
        for count in counts
    )


def run(case: Snapshots, bench: Bench) -> None:
    state = {f"w{i}": torch.randn(1024) for i in range(_NUM_TENSORS)}
    folder = bench.folder / "store"
    with vc.open_store(folder) as store, vc.Checkpointer(store, RUN) as checkpointer:

        def save(step: int) -> None:
            for tensor in state.values():
                tensor.add_(1.0)
            checkpointer.save(step, state).result()

        for step in range(case.num_snapshots):
            save(step)

        def delete_half() -> None:
            for snapshot in store.snapshots(RUN)[: case.num_snapshots // 2]:
                store.delete(RUN, snapshot.step)
            store.gc(0)

        def newest() -> None:
            with vc.open_store(folder) as other:
                other[RUN].read("w0")

        def timed(work: Callable[[], object]) -> Sample:
            before = store.counts
            with measure() as taken:
                work()
            after = store.counts
            assert before is not None, "the store does not count"  # noqa: S101 -- a mistake of the benchmark
            assert after is not None, "the store does not count"  # noqa: S101 -- likewise
            taken.counters |= {"requests": (after - before).num_requests, **stored(folder)}
            return taken.sample

        bench.add(SAVE, timed(lambda: save(case.num_snapshots)))
        bench.add(NEWEST, timed(newest))
        bench.add(PLAN, timed(lambda: store.gc(0, dry_run=True)))
        bench.add(COLLECT, timed(delete_half))
        if len(store.snapshots(RUN)) != case.num_snapshots + 1 - case.num_snapshots // 2:
            raise RuntimeError("the collection left other snapshots than it should")
        if not store[RUN].verify().ok:
            raise RuntimeError("the newest snapshot is damaged after the collection")


QUESTION = Question(
    name="gc",
    title="Many snapshots",
    text="Snapshots of eight small tensors that all differ, in memory-backed files.",
    cases=cases,
    run=run,
    columns=("requests", "files"),
)
