"""Forecast: how long a schedule takes, how much of it is bubble, and how much memory each rank needs at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.pipe.errors import ScheduleError
from vescale_train.pipe.schedules.walk import Placed, waits_for, walk

if TYPE_CHECKING:
    from vescale_train.pipe.schedules.instruction import Instruction
    from vescale_train.pipe.schedules.schedule import Schedule

PerStage = tuple[float, ...] | float
"""One number for each stage, or one for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What the work of one micro-batch costs, in seconds (any unit will do) and bytes."""

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    send: float = 0.0
    """From the end of a computation to when its result is there on the next rank."""
    activation_bytes: PerStage = 1.0
    """Held from a forward to the end of the backward."""
    held_after_input: float = 0.5
    """Of those, the share still held between the input part of a split backward and its weight part."""
    fixed_bytes: PerStage = 0.0
    """Parameters, gradients and optimizer state of a stage."""


@dataclass(frozen=True, slots=True)
class Span:
    """One computation in the forecast."""

    rank: int
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a schedule will be like."""

    spans: tuple[Span, ...]
    seconds: float
    """From the first forward to the end of the last backward."""
    busy_seconds: tuple[float, ...]
    """For each rank."""
    peak_bytes: tuple[float, ...]
    """For each rank."""

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they have nothing to do, from 0 to 1."""
        return 1 - sum(self.busy_seconds) / (self.seconds * len(self.busy_seconds)) if self.seconds else 0.0


def of_stage(cost: PerStage, stage: int) -> float:
    """Return a cost for one stage."""
    return cost[stage] if isinstance(cost, tuple) else float(cost)


def duration(leaf: Instruction, costs: Costs) -> float:
    """Return how long an instruction keeps its rank busy; only computations do."""
    parts = {
        "F": (costs.forward,),
        "B": (costs.backward_input, costs.backward_weight),
        "I": (costs.backward_input,),
        "W": (costs.backward_weight,),
    }
    return sum(of_stage(part, leaf.stage) for part in parts.get(leaf.kind, ()))


class _Clock:
    """When each rank is free and each instruction done, as the walk goes along."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.comms, self.ranks = schedule.has_comms, schedule.stage_ranks()
        self.free = [0.0] * schedule.num_ranks
        self.done: dict[Instruction, float] = {}
        self.spans: list[Span] = []

    def run(self, placed: Placed) -> None:
        for leaf in placed.cell.leaves():
            ready = max((self._arrival(leaf, any_of) for any_of in self._needs(leaf)), default=0.0)
            takes = duration(leaf, self.costs)
            start = max(self.free[placed.rank], ready) if takes else ready
            self.done[leaf] = start + takes
            if takes:
                self.free[placed.rank] = start + takes
                self.spans.append(Span(placed.rank, leaf, start, start + takes))

    def _needs(self, leaf: Instruction) -> tuple[tuple[Instruction, ...], ...]:
        return waits_for(leaf, self.schedule, comms=self.comms, ranks=self.ranks)

    def _arrival(self, leaf: Instruction, any_of: tuple[Instruction, ...]) -> float:
        other = next(each for each in any_of if each in self.done)
        crosses = self.ranks[other.stage] != self.ranks[leaf.stage]
        return self.done[other] + (self.costs.send if crosses else 0.0)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Forecast:
    """Forecast a schedule's time, bubble and peak memory from what its parts cost.

    Sends and receives keep no rank busy; they only delay what waits for them.

    Raises:
        ScheduleError: the schedule cannot come to its end.
    """
    costs = costs or Costs()
    clock = _Clock(schedule, costs)
    result = walk(schedule, clock.run)
    if result.stuck:
        raise ScheduleError(f"cannot forecast schedule {schedule.name!r}: it does not come to its end; validate it")
    busy = [0.0] * schedule.num_ranks
    for span in clock.spans:
        busy[span.rank] += span.end - span.start
    return Forecast(
        spans=tuple(clock.spans),
        seconds=max((span.end for span in clock.spans), default=0.0),
        busy_seconds=tuple(busy),
        peak_bytes=tuple(_peak_bytes(schedule, rank, costs) for rank in range(schedule.num_ranks)),
    )


def _peak_bytes(schedule: Schedule, rank: int, costs: Costs) -> float:
    fixed = sum(of_stage(costs.fixed_bytes, s) for s, owner in schedule.stage_ranks().items() if owner == rank)
    share = {"F": 1.0, "B": -1.0, "I": costs.held_after_input - 1.0, "W": -costs.held_after_input}
    now = peak = fixed
    for leaf in schedule.instructions(rank):
        now += share.get(leaf.kind, 0.0) * of_stage(costs.activation_bytes, leaf.stage)
        peak = max(peak, now)
    return peak
