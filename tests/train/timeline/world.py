"""What the ranks of ``test_moved.py`` do: wrong clocks made right, traces gathered and merged."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from vescale_train.timeline import TraceFile, close_ndtimers, flush, gather_spans, init_ndtimers, ndtimeit, wait
from vescale_train.timeline.clock import measure
from vescale_train.timeline.timers import NDTimers

SECOND = 10**9


def all_of_it(folder):
    """Return, by rank, what came of it."""
    rank = dist.get_rank()
    return {
        "offset": offset(rank),
        "barrier": barrier(rank),
        "program": program(Path(folder)),
    }


def offset(rank):
    """A clock that is rank hours ahead: its offset is found, and how wrong it may be is told."""
    found = measure(dist.group.WORLD, rounds=8, clock=lambda: time.monotonic_ns() + rank * 3600 * SECOND)
    return [found.offset_ns, found.error_ns]


def barrier(rank):
    """Spans around a barrier, by clocks that are seconds apart: no rank leaves before the last has come."""
    timers = NDTimers(group=dist.group.WORLD, clock=lambda: time.monotonic_ns() - rank * 77 * SECOND)
    timers.align()
    with timers.recorder.span("reduce", link="barrier"):
        dist.barrier()
    spans = gather_spans(timers.flush())
    error = timers.alignment.error_ns
    timers.close()
    return [[[span.rank, span.start_ns, span.stop_ns] for span in spans], error]


def program(folder):
    """The module's functions, with a file for every rank."""
    init_ndtimers([TraceFile(folder)])
    with ndtimeit("reduce", link="all"):
        dist.barrier()
    spans = flush(align=True)
    wait()
    close_ndtimers()
    return [span.rank for span in spans]
