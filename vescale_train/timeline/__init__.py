"""The timeline: spans of every rank on one clock, for a trace to look at and a report to act on."""

from vescale_train.timeline.checkpoint import load_spans, save_spans
from vescale_train.timeline.clock import Alignment, Offset
from vescale_train.timeline.handlers import Handler, LogLines, TraceFile
from vescale_train.timeline.html import write_page
from vescale_train.timeline.moved import gather_spans
from vescale_train.timeline.perfetto import merge_traces, read_trace
from vescale_train.timeline.report import RankReport, Report, Straggler, analyse
from vescale_train.timeline.span import Kind, Span
from vescale_train.timeline.timers import (
    NDTimers,
    add_span,
    close_ndtimers,
    current,
    flush,
    inc_step,
    init_ndtimers,
    ndtimeit,
    ndtimer,
    wait,
)

__all__ = [
    "Alignment",
    "Handler",
    "Kind",
    "LogLines",
    "NDTimers",
    "Offset",
    "RankReport",
    "Report",
    "Span",
    "Straggler",
    "TraceFile",
    "add_span",
    "analyse",
    "close_ndtimers",
    "current",
    "flush",
    "gather_spans",
    "inc_step",
    "init_ndtimers",
    "load_spans",
    "merge_traces",
    "ndtimeit",
    "ndtimer",
    "read_trace",
    "save_spans",
    "wait",
    "write_page",
]
