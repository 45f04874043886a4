"""Applies a plan to an unchanged module: parameters, reshards in forward, factories, gradient sync."""

from vescale_train.dmodule.apply import apply
from vescale_train.dmodule.attached import Attached, attach, attached, is_attached
from vescale_train.dmodule.vescale import DModule, is_dmodule, parallelize_module

__all__ = [
    "Attached",
    "DModule",
    "apply",
    "attach",
    "attached",
    "is_attached",
    "is_dmodule",
    "parallelize_module",
]
