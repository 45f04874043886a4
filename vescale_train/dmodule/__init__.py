"""Applies a plan to an unchanged module: parameters, reshards in forward, factories, gradient sync."""

from vescale_train.dmodule.apply import apply
from vescale_train.dmodule.attached import Attached, attach, attached, is_attached

__all__ = ["Attached", "apply", "attach", "attached", "is_attached"]
