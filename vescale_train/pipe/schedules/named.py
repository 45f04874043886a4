"""Named schedules, and the step from computations alone to everything that the runtime does."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from vescale_train.errors import ConfigError
from vescale_train.pipe.schedules.instruction import BACKWARD, FORWARD, Instruction
from vescale_train.pipe.schedules.schedule import Schedule
from vescale_train.pipe.schedules.validate import validate_pipeline_schedule
from vescale_train.pipe.torch_schedules import named_order, write_out

if TYPE_CHECKING:
    from vescale_train.pipe.schedules.schedule import Row


class PipelineScheduleType(StrEnum):
    """The schedules that have names."""

    GPIPE = "gpipe"
    SIMPLE_1F1B = "1f1b"
    INTERLEAVED_1F1B = "interleaved_1f1b"
    LOOPED_BFS = "looped_bfs"
    ZERO_BUBBLE = "zero_bubble"
    """ZB-H1, with one stage a rank or with several."""
    ZBV = "zbv"
    DUALPIPE_V = "dualpipe_v"


_TORCH_CLASSES = {
    PipelineScheduleType.INTERLEAVED_1F1B: "ScheduleInterleaved1F1B",
    PipelineScheduleType.LOOPED_BFS: "ScheduleLoopedBFS",
    PipelineScheduleType.ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    PipelineScheduleType.ZBV: "ScheduleZBVZeroBubble",
    PipelineScheduleType.DUALPIPE_V: "ScheduleDualPipeV",
}
_STAGES_PER_RANK = {
    PipelineScheduleType.GPIPE: 1,
    PipelineScheduleType.SIMPLE_1F1B: 1,
    PipelineScheduleType.ZBV: 2,
    PipelineScheduleType.DUALPIPE_V: 2,
}
"""For those that are made for one number only."""


def placement_of(kind: PipelineScheduleType) -> Literal["loop", "v"]:
    """Return how stages lie on ranks: 0 1 2 3 0 1 2 3 (loop), or 0 1 2 3 3 2 1 0 (v)."""
    return "v" if kind in {PipelineScheduleType.ZBV, PipelineScheduleType.DUALPIPE_V} else "loop"


def rank_of_stage(stage: int, num_ranks: int, placement: Literal["loop", "v"]) -> int:
    """Return the rank that has a stage."""
    turn, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if placement == "v" and turn % 2 else place


def named_schedule(
    kind: PipelineScheduleType | str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    forward_only: bool = False,
) -> Schedule:
    """Return a named schedule: computations only, proved right.

    Raises:
        ConfigError: the name is unknown, or the schedule does not exist for these numbers; the message says for which.
    """
    try:
        kind = PipelineScheduleType(kind)
    except ValueError:
        known = ", ".join(PipelineScheduleType)
        raise ConfigError(f"cannot make schedule {kind!r}: the names are {known}") from None
    only = _STAGES_PER_RANK.get(kind)
    if only is not None and stages_per_rank != only:
        raise ConfigError(
            f"cannot make schedule {kind.value!r} with {stages_per_rank} stages a rank: it has {only}; "
            "for several, use 'interleaved_1f1b' or 'zero_bubble'"
        )
    rows = (
        _forward_rows(num_ranks, stages_per_rank, num_microbatches, placement_of(kind))
        if forward_only
        else _rows(kind, num_ranks, stages_per_rank, num_microbatches)
    )
    schedule = Schedule(
        rows=rows,
        num_stages=num_ranks * stages_per_rank,
        num_microbatches=num_microbatches,
        name=kind.value,
        forward_only=forward_only,
    )
    validate_pipeline_schedule(schedule)
    return schedule


def _rows(kind: PipelineScheduleType, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> tuple[Row, ...]:
    if kind == PipelineScheduleType.GPIPE:
        return tuple(_one_f_one_b(rank, num_microbatches, num_microbatches) for rank in range(num_ranks))
    if kind == PipelineScheduleType.SIMPLE_1F1B:
        return tuple(_one_f_one_b(rank, num_ranks - rank, num_microbatches) for rank in range(num_ranks))
    try:
        made = named_order(_TORCH_CLASSES[kind], num_ranks, stages_per_rank, num_microbatches)
    except ValueError as error:
        asked = f"{kind.value!r} with {num_microbatches} micro-batches on {num_ranks} ranks"
        raise ConfigError(f"cannot make schedule {asked}: {error}") from error
    return tuple(tuple(row) for row in made)


def _one_f_one_b(stage: int, warm_up: int, num_microbatches: int) -> Row:
    """``warm_up`` forwards, then a backward after each forward, then the backwards that are left."""
    warm_up = min(warm_up, num_microbatches)
    row = [Instruction(stage, FORWARD, number) for number in range(warm_up)]
    for number in range(num_microbatches):
        row.append(Instruction(stage, BACKWARD, number))
        if warm_up + number < num_microbatches:
            row.append(Instruction(stage, FORWARD, warm_up + number))
    return tuple(row)


def _forward_rows(
    num_ranks: int, stages_per_rank: int, num_microbatches: int, placement: Literal["loop", "v"]
) -> tuple[Row, ...]:
    """Each rank takes its stages in order for one micro-batch after the other."""
    stages = range(num_ranks * stages_per_rank)
    own = [[s for s in stages if rank_of_stage(s, num_ranks, placement) == rank] for rank in range(num_ranks)]
    return tuple(
        tuple(Instruction(stage, FORWARD, number) for number in range(num_microbatches) for stage in own[rank])
        for rank in range(num_ranks)
    )


def with_communication(schedule: Schedule, *, unshard: bool = False) -> Schedule:
    """Return the schedule with sends, receives and reductions written out; one that has them stays as it is.

    Args:
        schedule: one that ``validate_pipeline_schedule`` has found right.
        unshard: also write out when fully sharded stages gather and free their weights.
    """
    if schedule.has_comms:
        return schedule
    ranks = schedule.stage_ranks()
    rows = write_out(
        schedule.rows,
        stage_rank=ranks.__getitem__,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        unshard=unshard,
    )
    return Schedule(
        rows=tuple(tuple(row) for row in rows),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        name=schedule.name,
        forward_only=schedule.forward_only,
    )
