"""Statistics of a tensor's values, added up block by block, so that no tensor is too large."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vescale_ckpt.compare.blocks import blocks
from vescale_ckpt.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_ckpt.geometry.box import Box


@dataclass(slots=True)
class Statistics:
    """What the values of a tensor are like; of complex numbers, their magnitudes."""

    num: int = 0
    num_nan: int = 0
    num_infinite: int = 0
    num_zero: int = 0
    minimum: float = math.inf
    """Of the finite values; ``inf`` where there are none."""
    maximum: float = -math.inf
    """Of the finite values; ``-inf`` where there are none."""
    mean: float = 0.0
    """Of the finite values."""
    _squares: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def num_finite(self) -> int:
        """How many values are numbers."""
        return self.num - self.num_nan - self.num_infinite

    @property
    def std(self) -> float:
        """Standard deviation of the finite values, as of a whole population."""
        return math.sqrt(self._squares / self.num_finite) if self.num_finite else 0.0

    def add(self, values: torch.Tensor) -> None:
        """Count some more values, of any dtype."""
        numbers = as_float64(values).reshape(-1)
        finite = numbers[numbers.isfinite()]
        nan = int(numbers.isnan().sum())
        before, new = self.num_finite, finite.numel()
        self.num += numbers.numel()
        self.num_nan += nan
        self.num_infinite += numbers.numel() - new - nan
        self.num_zero += int((finite == 0).sum())
        if not new:
            return
        low, high = finite.aminmax()
        self.minimum, self.maximum = min(self.minimum, float(low)), max(self.maximum, float(high))
        mean = float(finite.mean())
        squares = float((finite - mean).square().sum())
        # Chan, Golub and LeVeque: two sums of squares joined without cancellation.
        distance = mean - self.mean
        self._squares += squares + distance * distance * before * new / (before + new)
        self.mean += distance * new / (before + new)


def as_float64(values: torch.Tensor) -> torch.Tensor:
    """Return values as ``float64``; of complex numbers their magnitudes.

    Raises:
        InvalidInputError: torch cannot convert them.
    """
    try:
        return values.to(torch.complex128).abs() if values.dtype.is_complex else values.to(torch.float64)
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidInputError(f"cannot look at values of {values.dtype}: torch cannot convert them") from error


def statistics_of(read: Callable[[Box], torch.Tensor], shape: tuple[int, ...], item_bytes: int) -> Statistics:
    """Return the statistics of a tensor that is read box by box.

    Raises:
        InvalidInputError: torch cannot convert its values.
    """
    found = Statistics()
    for box in blocks(shape, item_bytes):
        found.add(read(box))
    return found
