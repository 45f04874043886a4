"""Schedules as data: a small language, named schedules, a validator that proves, a forecast and a drawing."""

from vescale_train.pipe.schedules.draw import draw_html, draw_svg
from vescale_train.pipe.schedules.instruction import (
    Instruction,
    Kind,
    parse_instructions,
    register_instruction,
    unregister_instruction,
)
from vescale_train.pipe.schedules.named import PipelineScheduleType, named_schedule, with_communication
from vescale_train.pipe.schedules.schedule import Schedule, schedule_from_text
from vescale_train.pipe.schedules.simulate import Costs, Forecast, Span, simulate
from vescale_train.pipe.schedules.validate import Sharding, in_flight, validate_pipeline_schedule

__all__ = [
    "Costs",
    "Forecast",
    "Instruction",
    "Kind",
    "PipelineScheduleType",
    "Schedule",
    "Sharding",
    "Span",
    "draw_html",
    "draw_svg",
    "in_flight",
    "named_schedule",
    "parse_instructions",
    "register_instruction",
    "schedule_from_text",
    "simulate",
    "unregister_instruction",
    "validate_pipeline_schedule",
    "with_communication",
]
