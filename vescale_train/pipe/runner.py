"""A schedule made ready for this rank's stages, to be run again and again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vescale_train.pipe.run.stage import RunningStage, Work
from vescale_train.pipe.run.torch_stage import Runtime, own_group
from vescale_train.pipe.run.units import UnitGradients, in_order
from vescale_train.pipe.schedules import Sharding, validate_pipeline_schedule, with_communication
from vescale_train.pipe.wrapping import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.pipe.stage import PipeStage


class Runner:
    """torch's runtime with the stages of this rank, for training or for evaluation."""

    def __init__(
        self,
        stage: PipeStage,
        sharding: Sharding,
        *,
        forward_only: bool,
        context: Any,
        on_reduce: Callable[[int], None],
    ) -> None:
        plan, place = stage.plan, stage.place
        schedule = plan.schedule(place.num_ranks, forward_only=forward_only)
        validate_pipeline_schedule(
            schedule,
            num_ranks=place.num_ranks,
            num_stages=stage.num_stages,
            num_microbatches=plan.num_microbatches,
            sharding=sharding,
        )
        schedule = with_communication(schedule, unshard=sharding.fsdp)
        validate_pipeline_schedule(schedule, sharding=sharding)
        place = place if place.group is not None else replace(place, group=own_group())
        self.place = place
        self.device = stage.front.device
        self.units = UnitGradients()
        self.keeps_units = plan.exact and all(is_plain(chunk) for chunk in stage.chunks)
        ranks = {number: plan.rank_of(number, place.num_ranks) for number in range(stage.num_stages)}
        self.stages = [
            RunningStage(
                chunk,
                index=number,
                num_stages=stage.num_stages,
                ranks=ranks,
                place=place,
                device=self.device,
                units=self.units,
                on_reduce=on_reduce,
            )
            for number, chunk in zip(stage.stages, stage.chunks, strict=True)
        ]
        if self.keeps_units and not forward_only:
            for number, chunk in zip(stage.stages, stage.chunks, strict=True):
                tied = [
                    stage.module.get_parameter(name)
                    for tie in stage.ties
                    for holder, name in zip(tie.stages, tie.name_on, strict=True)
                    if holder == number
                ]
                self.units.watch(number, tied, [] if in_order(schedule, number) else list(chunk.parameters()))
        self._runtime = Runtime(list(self.stages), schedule, context)

    def run(self, work: Work) -> None:
        """Run one step."""
        self.units.clear()
        for stage in self.stages:
            stage.work = work
            stage.clear_runtime_states()
        try:
            self._runtime.run()
        finally:
            for stage in self.stages:
                stage.work = None
                stage.clear_runtime_states()
