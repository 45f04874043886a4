"""What goes wrong in silence is an error: checks of calls on DTensors, off, warning or raising."""

from vescale_train.guard.mode import guard
from vescale_train.guard.settings import SilentFaultWarning, exempt

__all__ = ["SilentFaultWarning", "exempt", "guard"]
