"""Checks of written-out UNSHARD, RESHARD and REDUCE_GRAD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_train.pipe.schedules.instruction import REDUCE, RESHARD, UNSHARD
from vescale_train.pipe.schedules.walk import done_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_train.pipe.schedules.schedule import Schedule


def shard_problems(schedule: Schedule) -> Iterator[str]:
    """Give what is wrong with gathering weights and reducing gradients, if the schedule writes either out."""
    kinds = schedule.kinds()
    for stage, rank in sorted(schedule.stage_ranks().items()):
        if REDUCE in kinds and not schedule.forward_only:
            yield from (f"rank {rank}, stage {stage}: {text}" for text in _reduce_problems(schedule, rank, stage))
        if kinds & {UNSHARD, RESHARD}:
            yield from (f"rank {rank}, stage {stage}: {text}" for text in _unshard_problems(schedule, rank, stage))


def _reduce_problems(schedule: Schedule, rank: int, stage: int) -> Iterator[str]:
    kinds = [leaf for leaf in schedule.instructions(rank) if leaf.stage == stage]
    places = [place for place, leaf in enumerate(kinds) if leaf.kind == REDUCE]
    if len(places) != 1:
        yield "its gradients are never reduced" if not places else f"its gradients are reduced {len(places)} times"
        return
    late = [str(leaf) for leaf in kinds[places[0] :] if done_weight(leaf)]
    if late:
        yield f"its gradients are reduced before {', '.join(late)}"


def _unshard_problems(schedule: Schedule, rank: int, stage: int) -> Iterator[str]:
    gathered = False
    for leaf in schedule.instructions(rank):
        if leaf.stage != stage:
            continue
        if leaf.kind == UNSHARD:
            if gathered:
                yield "its weights are gathered twice"
            gathered = True
        elif leaf.kind == RESHARD:
            if not gathered:
                yield "its weights are freed without having been gathered"
            gathered = False
        elif leaf.kind in {"F", "B", "I", "W"} and not gathered:
            yield f"{leaf} runs on weights that are not gathered"
