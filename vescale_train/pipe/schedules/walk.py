"""A walk through a schedule as the runtime would: each rank in order, waiting for what others have to do first.

Validator and forecast both stand on it, so a schedule that is forecast is one that runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vescale_train.pipe.schedules.instruction import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Instruction,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.pipe.schedules.schedule import Schedule

Alternatives = tuple[Instruction, ...]
"""Any one of these being done is enough."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An instruction (or an overlap) and where it stands."""

    rank: int
    position: int
    cell: Instruction


@dataclass(kw_only=True, slots=True)
class Walk:
    """How far a walk came."""

    order: list[Placed] = field(default_factory=list)
    """Everything that could be done, in an order in which it can be done."""
    stuck: dict[int, tuple[Placed, tuple[Alternatives, ...]]] = field(default_factory=dict)
    """Rank -> the instruction it cannot get past, and what that waits for; empty if all ranks came to the end."""


def waits_for(leaf: Instruction, schedule: Schedule, *, comms: bool, ranks: dict[int, int]) -> tuple[Alternatives, ...]:
    """Return what must be done before an instruction, each with the alternatives that will do.

    With written-out sends and receives (``comms``), a receive waits for its send and a computation for its receive;
    otherwise a computation waits for that of the neighbouring stage. A receive is taken to block: torch's own
    schedules hold to that, and the first exchange of a new shape does block.
    """
    stage, microbatch = leaf.stage, leaf.microbatch
    last = schedule.num_stages - 1
    before = (Instruction(stage - 1, FORWARD, microbatch),)
    after = tuple(Instruction(stage + 1, kind, microbatch) for kind in (BACKWARD, BACKWARD_INPUT))
    received: tuple[Alternatives, ...]
    match leaf.kind:
        case "F":
            received = _arrival(
                leaf, RECEIVE_FORWARD, before, stage > 0, comms and ranks.get(stage - 1) != ranks.get(stage)
            )
        case "B" | "I":
            own: Alternatives = (Instruction(stage, FORWARD, microbatch),)
            crosses = comms and ranks.get(stage + 1) != ranks.get(stage)
            received = (own, *_arrival(leaf, RECEIVE_BACKWARD, after, stage < last, crosses))
        case "W":
            received = ((Instruction(stage, BACKWARD_INPUT, microbatch),),)
        case "SEND_F":
            received = ((Instruction(stage, FORWARD, microbatch),),)
        case "SEND_B":
            received = (tuple(Instruction(stage, kind, microbatch) for kind in (BACKWARD, BACKWARD_INPUT)),)
        case "RECV_F":
            received = ((Instruction(stage - 1, SEND_FORWARD, microbatch),),)
        case "RECV_B":
            received = ((Instruction(stage + 1, SEND_BACKWARD, microbatch),),)
        case _:
            received = ()
    return received


def _arrival(
    leaf: Instruction, receive: str, neighbour: Alternatives, has_neighbour: bool, crosses: bool
) -> tuple[Alternatives, ...]:
    if not has_neighbour:
        return ()
    return ((Instruction(leaf.stage, receive, leaf.microbatch),),) if crosses else (neighbour,)


def walk(schedule: Schedule, on_done: Callable[[Placed], None] | None = None) -> Walk:
    """Run through a schedule, rank by rank as far as each can go, until all are at their ends or nobody can move.

    ``on_done`` is called for each cell in the order of execution.
    """
    result = Walk()
    comms, ranks = schedule.has_comms, schedule.stage_ranks()
    done: set[Instruction] = set()
    pointers = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while pointers[rank] < len(row):
                cell = row[pointers[rank]]
                placed = None if cell is None else Placed(rank, pointers[rank], cell)
                if placed is not None:
                    missing = _missing(placed.cell, schedule, comms, ranks, done)
                    if missing:
                        result.stuck[rank] = (placed, missing)
                        break
                    done.update(placed.cell.leaves())
                    result.order.append(placed)
                    if on_done is not None:
                        on_done(placed)
                pointers[rank] += 1
                result.stuck.pop(rank, None)
                moved = True
    return result


def _missing(
    cell: Instruction, schedule: Schedule, comms: bool, ranks: dict[int, int], done: set[Instruction]
) -> tuple[Alternatives, ...]:
    return tuple(
        alternatives
        for leaf in cell.leaves()
        for alternatives in waits_for(leaf, schedule, comms=comms, ranks=ranks)
        if not done.intersection(alternatives)
    )


def done_weight(leaf: Instruction) -> bool:
    """Return whether an instruction completes the weight gradients of its stage and micro-batch."""
    return leaf.kind in {BACKWARD, BACKWARD_WEIGHT}
