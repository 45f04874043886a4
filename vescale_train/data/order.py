"""The order of the samples over all epochs: a pure function from a global sample index to an index into the data set.

All that a training run needs to remember of its data is how many samples it has taken. Who takes them, one rank or a
thousand, has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from vescale_train.data.permutation import permute
from vescale_train.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Which sample comes when.

    Epochs follow one another without a gap. Where ``end`` is "carry", a batch at the end of an epoch is filled from the
    next, so every sample is seen once an epoch. Where it is "drop", the samples at the end of an epoch's order that do
    not fill a batch are left out of it; another epoch's order leaves out others.
    """

    num_samples: int
    global_batch: int
    """Samples a step, over all ranks."""
    seed: int
    shuffle: bool = True
    end: Literal["carry", "drop"] = "carry"

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"cannot draw batches from a data set of {self.num_samples} samples")
        if self.global_batch < 1:
            raise ConfigError(f"cannot draw batches of {self.global_batch} samples: global_batch is at least 1")
        if self.end not in {"carry", "drop"}:
            raise ConfigError(f"unknown end={self.end!r}: choose 'carry' or 'drop'")
        if self.end == "drop" and self.global_batch > self.num_samples:
            raise ConfigError(
                f"cannot draw batches of {self.global_batch} from {self.num_samples} samples with end='drop': every "
                f"epoch would be dropped whole; take end='carry' or a smaller batch"
            )

    @property
    def epoch_samples(self) -> int:
        """How many samples are seen in an epoch."""
        whole = self.num_samples // self.global_batch * self.global_batch
        return whole if self.end == "drop" else self.num_samples

    def epoch_of(self, sample: int) -> int:
        """Return the epoch that the ``sample``-th of the run belongs to."""
        return sample // self.epoch_samples

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices into the data set of the run's samples ``start`` to ``stop``, int64[stop - start]."""
        if not 0 <= start <= stop:
            raise InternalError(f"samples {start} to {stop} are no stretch of a run")
        samples = np.arange(start, stop, dtype=np.int64)
        epochs, positions = np.divmod(samples, self.epoch_samples)
        if not self.shuffle:
            return positions
        result = np.empty_like(positions)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            result[mine] = permute(positions[mine], self.num_samples, seed=self.seed, epoch=int(epoch))
        return result


def share(rank: int, num_ranks: int, start: int, stop: int) -> tuple[int, int]:
    """Return the part of the samples ``start`` to ``stop`` that a data-parallel rank takes: neighbours stay together.

    So micro-batch i of the step is the same samples, in the same order, on any number of ranks.
    """
    each = (stop - start) // num_ranks
    return start + rank * each, start + (rank + 1) * each
