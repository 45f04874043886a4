"""Pipeline parallelism: any model in stages, any schedule, checked before it runs."""

from vescale_train.pipe.batch import Batch
from vescale_train.pipe.engine import Context, PipeEngine
from vescale_train.pipe.errors import BatchError, ScheduleError, SplitError
from vescale_train.pipe.manual import manual_stage
from vescale_train.pipe.plan import ModeType, PipelineParallelPlan, PipelineSplitMethodType
from vescale_train.pipe.schedules import (
    Costs,
    PipelineScheduleType,
    Schedule,
    draw_html,
    draw_svg,
    named_schedule,
    register_instruction,
    schedule_from_text,
    simulate,
    validate_pipeline_schedule,
)
from vescale_train.pipe.stage import PipeStage, construct_pipeline_stage
from vescale_train.pipe.traced import traced_stage

__all__ = [
    "Batch",
    "BatchError",
    "Context",
    "Costs",
    "ModeType",
    "PipeEngine",
    "PipeStage",
    "PipelineParallelPlan",
    "PipelineScheduleType",
    "PipelineSplitMethodType",
    "Schedule",
    "ScheduleError",
    "SplitError",
    "construct_pipeline_stage",
    "draw_html",
    "draw_svg",
    "manual_stage",
    "named_schedule",
    "register_instruction",
    "schedule_from_text",
    "simulate",
    "traced_stage",
    "validate_pipeline_schedule",
]
