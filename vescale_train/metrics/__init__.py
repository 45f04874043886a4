"""Metrics: MFU, tokens a second, memory, and progress for people."""

from vescale_train.metrics.flops import count_flops, measure_flops, peak_flops, transformer_flops
from vescale_train.metrics.memory import Memory, read_memory, reset_peak
from vescale_train.metrics.meter import Meter, Reading
from vescale_train.metrics.progress import Progress, describe

__all__ = [
    "Memory",
    "Meter",
    "Progress",
    "Reading",
    "count_flops",
    "describe",
    "measure_flops",
    "peak_flops",
    "read_memory",
    "reset_peak",
    "transformer_flops",
]
