"""The errors of the pipeline room."""

from __future__ import annotations

from vescale_train.errors import InvalidInputError

__all__ = ["BatchError", "ScheduleError", "SplitError"]


class ScheduleError(InvalidInputError):
    """A pipeline schedule is wrong, or does not fit the stages; ``problems`` lists all of it, one line each."""

    kind = "schedule"

    @property
    def problems(self) -> tuple[str, ...]:
        """Every fault found, one line each."""
        return tuple(self.context.get("problems", ()))


class SplitError(InvalidInputError):
    """A model cannot be cut into pipeline stages as asked."""

    kind = "split"


class BatchError(InvalidInputError):
    """A minibatch cannot be run by this pipeline; raised on all ranks before anything is sent."""

    kind = "batch"
