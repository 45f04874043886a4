"""The named n-dimensional mesh of ranks, and the questions that one asks it."""

from vescale_train.mesh.axes import AXES, BATCH_AXES, resolve_sizes
from vescale_train.mesh.build import init
from vescale_train.mesh.made import current
from vescale_train.mesh.queries import axis, batch_group, coordinate, lookup_rank, names, size, whole

__all__ = [
    "AXES",
    "BATCH_AXES",
    "axis",
    "batch_group",
    "coordinate",
    "current",
    "init",
    "lookup_rank",
    "names",
    "resolve_sizes",
    "size",
    "whole",
]
