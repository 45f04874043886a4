"""The named n-dimensional mesh of ranks, and the questions that one asks it."""

from vescale_train.mesh.axes import AXES, BATCH_AXES, resolve_sizes
from vescale_train.mesh.build import init
from vescale_train.mesh.facade import VESCALE_DEVICE_MESH, VeDeviceMesh, init_distributed
from vescale_train.mesh.made import current
from vescale_train.mesh.queries import axis, batch_group, coordinate, lookup_rank, names, size, whole

__all__ = [
    "AXES",
    "BATCH_AXES",
    "VESCALE_DEVICE_MESH",
    "VeDeviceMesh",
    "axis",
    "batch_group",
    "coordinate",
    "current",
    "init",
    "init_distributed",
    "lookup_rank",
    "names",
    "resolve_sizes",
    "size",
    "whole",
]
