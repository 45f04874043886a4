"""Saves and loads of one process, side by side: what several questions have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.measure import evict, measure, settle, storage_of, stored
from benchmarks.states import blank_like, change, require_equal, spoil, state_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.measure import Sample
    from benchmarks.peers import Side
    from benchmarks.states import State

_COLD = 0.8
"""A load counts as cold if so much of what it needs came from the disk."""


def compare_saves(bench: Bench, state: State, sides: Sequence[Side], *, unchanged: bool = False) -> None:
    """Save turn after turn, changing the state in between unless ``unchanged``."""
    total = state_bytes(state)

    def turn_of(side: Side) -> Callable[[int], Sample]:
        folder = bench.folder / _folder_name(side)

        def act(turn: int) -> Sample:
            del turn
            if not unchanged:
                change(state)
            settle(bench.folder)
            with measure() as taken:
                taken.counters |= side.save(state, folder)
            taken.counters |= {"bytes_needed": total, **stored(folder)}
            side.discard(folder)
            return taken.sample

        return act

    try:
        bench.compare({side.name: turn_of(side) for side in sides})
    finally:
        for side in sides:
            side.close()


def compare_loads(bench: Bench, state: State, sides: Sequence[Side], *, cold: bool = False) -> None:
    """Save once a side, then load into place turn after turn, from a dropped page cache where ``cold``."""
    total = state_bytes(state)
    target = blank_like(state)
    for side in sides:
        side.save(state, bench.folder / _folder_name(side))
    settle(bench.folder)
    if cold and storage_of(bench.folder) != "disk":
        bench.note("nothing is ever cold here: files lie in memory")

    def turn_of(side: Side) -> Callable[[int], Sample]:
        folder = bench.folder / _folder_name(side)

        def act(turn: int) -> Sample:
            spoil(target)
            if cold:
                evict(folder)
            with measure() as taken:
                taken.counters |= side.load(target, folder)
            taken.counters |= {"bytes_needed": total}
            if turn == 0:
                require_equal(target, state)
            if cold and taken.sample.disk_read_bytes < _COLD * total:
                bench.note(f"{side.name}: not cold, {taken.sample.disk_read_bytes:,} bytes came from the disk")
            return taken.sample

        return act

    try:
        bench.compare({side.name: turn_of(side) for side in sides})
    finally:
        for side in sides:
            side.close()


def _folder_name(side: Side) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in side.name)
