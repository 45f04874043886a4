"""Proof that a schedule is right: each micro-batch once, forward and backward, in a legal order, without deadlock.

Each check is a small function that adds lines to a list, so that one error tells everything that is wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.pipe.errors import ScheduleError
from vescale_train.pipe.schedules.instruction import OVERLAP, Instruction, kind_of
from vescale_train.pipe.schedules.messages import message_problems
from vescale_train.pipe.schedules.shards import shard_problems
from vescale_train.pipe.schedules.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_train.pipe.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How the stages' gradients are reduced over data parallel ranks, as far as it matters to a schedule."""

    fsdp: bool = False
    """Stages are wrapped by torch's ``fully_shard``."""
    reshard_after_forward: bool = False
    """Its option; a stage then frees its weights between forward and backward."""
    ddp: bool = False
    """Stages are wrapped by torch's ``DistributedDataParallel``, which reduces in hooks of a whole backward."""


def validate_pipeline_schedule(
    schedule: Schedule,
    *,
    num_ranks: int | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    sharding: Sharding | None = None,
    max_in_flight: int | None = None,
) -> None:
    """Prove that a schedule runs every micro-batch forward and backward once on every stage, and always ends.

    Checked: the counts; every cell; each stage on one rank; for each stage and micro-batch one forward and one whole
    or split backward, in that order; dependencies between ranks, by simulation, with the circle of a deadlock named;
    if sends and receives are written out, that each has its partner and that messages between two ranks arrive in the
    order in which they are sent; gradients reduced once and after the last backward; no computation on resharded
    weights; and what the wrapping of the stages allows.

    Args:
        schedule: with or without written-out communication.
        num_ranks: pipeline ranks there will be; None takes the schedule's word, as for the next two.
        num_stages: stages there will be.
        num_microbatches: micro-batches there will be.
        sharding: how stages are wrapped.
        max_in_flight: refuse schedules that keep more forward activations than this on any rank.

    Raises:
        ScheduleError: with all faults found, each with its rank, its place and its reason.
    """
    problems = [
        f"the schedule has {found} {what}, but there are {asked}"
        for what, found, asked in (
            ("ranks", schedule.num_ranks, num_ranks),
            ("stages", schedule.num_stages, num_stages),
            ("micro-batches", schedule.num_microbatches, num_microbatches),
        )
        if asked is not None and found != asked
    ]
    problems += _cell_problems(schedule) or [
        *_place_problems(schedule),
        *_work_problems(schedule),
        *message_problems(schedule),
        *shard_problems(schedule),
    ]
    problems += _sharding_problems(schedule, sharding or Sharding())
    if not problems:
        problems += _deadlocks(schedule) or _memory_problems(schedule, max_in_flight)
    if problems:
        raise ScheduleError(
            f"cannot run schedule {schedule.name!r} ({schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches):\n  " + "\n  ".join(problems),
            problems=tuple(problems),
        )


def _where(rank: int, position: int, cell: Instruction) -> str:
    return f"rank {rank}, position {position} ({cell})"


def _cells(schedule: Schedule) -> Iterator[tuple[str, Instruction]]:
    for rank, row in enumerate(schedule.rows):
        for position, cell in enumerate(row):
            if cell is not None:
                yield _where(rank, position, cell), cell


def _cell_problems(schedule: Schedule) -> list[str]:
    """Return what is wrong with single cells; later checks rely on there being nothing."""
    problems = []
    for where, cell in _cells(schedule):
        if cell.parts or cell.kind == OVERLAP:
            problems += [f"{where}: {problem}" for problem in _overlap_problems(cell)]
        problems += [
            f"{where}: {problem}"
            for leaf in cell.leaves()
            if (problem := _leaf_problem(leaf, schedule)) is not None and leaf.kind != OVERLAP
        ]
    return problems


def _overlap_problems(cell: Instruction) -> Iterator[str]:
    if cell.kind != OVERLAP:
        yield f"{cell.kind} cannot have parts; only {OVERLAP} can"
    if [leaf.kind == "F" for leaf in cell.parts] not in ([True, False], [False, True]):
        yield "an overlap is one forward and one backward"
    if any(leaf.kind not in {"F", "B", "I"} for leaf in cell.parts):
        yield "only F, B and I can be parts of an overlap"
    if len({leaf.microbatch for leaf in cell.parts}) < len(cell.parts):
        yield "the parts of an overlap must be of different micro-batches, since one would wait for the other"


def _leaf_problem(leaf: Instruction, schedule: Schedule) -> str | None:
    kind = kind_of(leaf.kind)
    if kind is None:
        return f"nobody has registered an instruction {leaf.kind}; see register_instruction"
    if not 0 <= leaf.stage < schedule.num_stages:
        return f"there is no stage {leaf.stage}; stages are 0 to {schedule.num_stages - 1}"
    if leaf.microbatch is None:
        return f"{leaf.kind} needs a micro-batch" if kind.microbatch == "needed" else None
    last = schedule.num_microbatches - 1
    if kind.microbatch == "none":
        return f"{leaf.kind} takes no micro-batch"
    return None if leaf.microbatch <= last else f"there is no micro-batch {leaf.microbatch}; they are 0 to {last}"


def _place_problems(schedule: Schedule) -> Iterator[str]:
    ranks = schedule.stage_ranks()
    for rank in range(schedule.num_ranks):
        for stage in sorted({leaf.stage for leaf in schedule.instructions(rank)}):
            if ranks[stage] != rank:
                yield f"stage {stage} is on rank {ranks[stage]} and on rank {rank}; a stage lives on one rank"
        if rank not in ranks.values():
            yield f"rank {rank} has no stage, so it would hold nothing and do nothing"
    for stage in range(schedule.num_stages):
        if stage not in ranks:
            yield f"stage {stage} is on no rank"


def _work_problems(schedule: Schedule) -> Iterator[str]:
    """Count and order the computations of each stage and micro-batch."""
    for stage, rank in sorted(schedule.stage_ranks().items()):
        work: dict[int, list[str]] = {}
        for leaf in schedule.instructions(rank):
            if leaf.stage == stage and leaf.microbatch is not None and leaf.kind in {"F", "B", "I", "W"}:
                work.setdefault(leaf.microbatch, []).append(leaf.kind)
        for microbatch in range(schedule.num_microbatches):
            for problem in _one_work_problems(work.get(microbatch, []), schedule.forward_only):
                yield f"rank {rank}, stage {stage}, micro-batch {microbatch}: {problem}"


def _one_work_problems(kinds: list[str], forward_only: bool) -> Iterator[str]:
    count = Counter(kinds)
    if count["F"] != 1:
        yield "no forward" if not count["F"] else f"{count['F']} forwards; its activations would be overwritten"
    if forward_only:
        if count.total() > count["F"]:
            yield "a backward in a schedule that only runs forward"
        return
    yield from _backward_count_problems(count)
    for earlier, later in (("F", "B"), ("F", "I"), ("I", "W")):
        if count[earlier] and count[later] and kinds.index(later) < kinds.index(earlier):
            yield f"{later} comes before {earlier}"


def _backward_count_problems(count: Counter[str]) -> Iterator[str]:
    if count["B"] and (count["I"] or count["W"]):
        yield "a whole backward (B) and a split one (I, W); gradients would be counted twice"
    elif not (count["B"] or count["I"] or count["W"]):
        yield "no backward"
    elif count["I"] and not count["W"]:
        yield "I without W; its weights would get no gradient"
    elif count["W"] and not count["I"]:
        yield "W without I; there is nothing to compute it from"
    for kind in ("B", "I", "W"):
        if count[kind] > 1:
            yield f"{count[kind]} times {kind}; gradients would be counted twice"


def _sharding_problems(schedule: Schedule, sharding: Sharding) -> Iterator[str]:
    if sharding.ddp and schedule.num_stages > schedule.num_ranks:
        yield (
            "several stages lie on a rank and are wrapped by torch's DistributedDataParallel, which counts gradients "
            "twice then and fails in its second step; use one stage a rank, or fully_shard"
        )
    if not schedule.splits_backward:
        return
    if sharding.fsdp and sharding.reshard_after_forward:
        yield (
            "the backward is split (I, W) and stages are wrapped by fully_shard(reshard_after_forward=True): torch "
            "then gives wrong or missing gradients; use reshard_after_forward=False or a schedule with whole backwards"
        )
    if sharding.ddp:
        yield (
            "the backward is split (I, W) and stages are wrapped by torch's DistributedDataParallel, which then never "
            "reduces; use the DistributedDataParallel of this package or a schedule with whole backwards"
        )


def _deadlocks(schedule: Schedule) -> list[str]:
    result = walk(schedule)
    if not result.stuck:
        return []
    ranks = schedule.stage_ranks()
    lines = []
    for rank, (placed, missing) in sorted(result.stuck.items()):
        wanted = missing[0][0]
        lines.append(
            f"deadlock: {_where(rank, placed.position, placed.cell)} waits for {wanted} on rank {ranks[wanted.stage]}, "
            "which never comes to it"
        )
    return lines


def _memory_problems(schedule: Schedule, max_in_flight: int | None) -> list[str]:
    if max_in_flight is None:
        return []
    return [
        f"rank {rank} keeps the activations of {peak} forwards at once; at most {max_in_flight} are allowed"
        for rank, peak in enumerate(in_flight(schedule))
        if peak > max_in_flight
    ]


def in_flight(schedule: Schedule) -> list[int]:
    """Return for each rank how many forwards' activations it holds at most at once (freed by B or by W)."""
    peaks = []
    for rank in range(schedule.num_ranks):
        now = peak = 0
        for leaf in schedule.instructions(rank):
            now += {"F": 1, "B": -1, "W": -1}.get(leaf.kind, 0)
            peak = max(peak, now)
        peaks.append(peak)
    return peaks
