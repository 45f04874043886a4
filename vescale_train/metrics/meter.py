"""The meter: from steps and moments to tokens a second, MFU and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.errors import ConfigError
from vescale_train.metrics.memory import Memory, read_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the meter shows after a step. Rates are means over the last steps."""

    step: int
    loss: float
    step_seconds: float
    tokens_per_second: float
    """Over all ranks."""
    mfu: float | None
    """Model operations a second over the peak of all ranks, 0 to 1; None where one of the two is not known."""
    memory: Memory
    seconds_left: float | None
    """None where no end is known."""


class Meter:
    """Measures steps as they end. The first step only starts the clock: it compiles, allocates and connects.

    Args:
        flops_per_token: operations that the model needs for a token of training; see ``transformer_flops``.
        peak_flops: operations a second of one rank's device; see ``peak_flops``.
        num_ranks: ranks of the whole mesh.
        num_steps: the last step of the run, if it has one.
        window: steps to take the mean over.
        device: whose memory is read.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        num_ranks: int = 1,
        num_steps: int | None = None,
        window: int = 20,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 1 or num_ranks < 1:
            raise ConfigError(f"a meter needs a window and ranks: window={window}, num_ranks={num_ranks}")
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._num_ranks = num_ranks
        self._num_steps = num_steps
        self._device = device
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def update(self, *, step: int, loss: float, tokens: int) -> Reading:
        """Note the end of a step that took ``tokens`` over all ranks, and return the meter's reading."""
        self._ends.append((self._clock(), tokens))
        seconds = self._ends[-1][0] - self._ends[0][0]
        counted = sum(number for _, number in self._ends) - self._ends[0][1]
        num_steps = len(self._ends) - 1
        step_seconds = seconds / num_steps if num_steps else 0.0
        rate = counted / seconds if seconds > 0 else 0.0
        known = self._num_steps is not None and num_steps > 0
        return Reading(
            step=step,
            loss=loss,
            step_seconds=step_seconds,
            tokens_per_second=rate,
            mfu=self._mfu(rate),
            memory=read_memory(self._device),
            seconds_left=max(0, self._num_steps - step) * step_seconds if known and self._num_steps else None,
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self._flops_per_token is None or self._peak_flops is None or not tokens_per_second:
            return None
        return self._flops_per_token * tokens_per_second / (self._peak_flops * self._num_ranks)
