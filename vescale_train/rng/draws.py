"""The random operations of torch, written for a place: what each writes, given which numbers come next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vescale_train.errors import InvalidInputError
from vescale_train.rng import sample
from vescale_train.rng.fill import fill
from vescale_train.rng.place import Piece, Place, place_of_plain

if TYPE_CHECKING:
    from vescale_train.rng.philox import Key

_INT_COUNT = {torch.uint8: 1 << 8, torch.int8: 1 << 7, torch.int16: 1 << 15, torch.int32: 1 << 31, torch.bool: 2}


def uniform(place: Place, key: Key, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> None:
    """Write numbers of ``[low, high)``; in [0, 1) they are the same for every dtype, cut to its digits."""
    check_floating(dtype, "uniform_")
    if not low <= high or math.isinf(high - low):
        raise InvalidInputError(f"uniform_ needs finite bounds in order, not [{low}, {high})")
    digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
    if (low, high) == (0.0, 1.0):
        fill(place, key, lambda words: sample.uniform(words, digits))
        return
    below = _below(high, dtype)

    def numbers(words: torch.Tensor) -> torch.Tensor:
        scaled = sample.uniform(words, digits).mul_(high - low).add_(low)
        return scaled.to(dtype).clamp_(max=max(below, low))

    fill(place, key, numbers)


def normal(place: Place, key: Key, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> None:
    """Write normal numbers, computed in float64 and rounded once."""
    check_floating(dtype, "normal_")
    if not std >= 0:
        raise InvalidInputError(f"normal_ needs a standard deviation that is not negative, not {std}")
    fill(place, key, lambda words: sample.normal(words).mul_(std).add_(mean))


def truncated_normal(place: Place, key: Key, mean: float, std: float, bounds: tuple[float, float]) -> None:
    """Write normal numbers within ``bounds``, both included; one draw an element."""
    low, high = bounds
    if not low <= high or not std > 0:
        raise InvalidInputError(f"a truncated normal needs std > 0 and bounds in order, not {std} and [{low}, {high}]")
    a, b = (low - mean) / std, (high - mean) / std
    fill(place, key, lambda words: sample.truncated_normal(words, a, b).mul_(std).add_(mean).clamp_(min=low, max=high))


def bernoulli(place: Place, key: Key, probability: float = 0.5) -> None:
    """Write ones with a probability, zeros otherwise."""
    if not 0 <= probability <= 1:
        raise InvalidInputError(f"bernoulli_ needs a probability, not {probability}")
    fill(place, key, lambda words: sample.bernoulli(words, probability))


def bernoulli_of(place: Place, key: Key, probabilities: list[torch.Tensor]) -> None:
    """Write ones with a probability of each element's own: ``probabilities`` are tensors like the pieces."""
    for piece, probability in zip(place.pieces, probabilities, strict=True):
        if bool(((probability < 0) | (probability > 1)).any()):
            raise InvalidInputError("bernoulli_ needs probabilities, but some are not in [0, 1]")
        drawn = torch.empty_like(piece.memory, dtype=torch.float64, memory_format=torch.contiguous_format)
        fill(Place(place.shape, (Piece(piece.box, drawn),)), key, lambda words: sample.uniform(words, 32))
        piece.memory.copy_(drawn < probability)


def exponential(place: Place, key: Key, dtype: torch.dtype, rate: float = 1.0) -> None:
    """Write exponential numbers."""
    check_floating(dtype, "exponential_")
    if not rate > 0:
        raise InvalidInputError(f"exponential_ needs a positive rate, not {rate}")
    fill(place, key, lambda words: sample.exponential(words).div_(rate))


def integers(place: Place, key: Key, dtype: torch.dtype, low: int | None = None, high: int | None = None) -> None:
    """Write integers of ``[low, high)``; without bounds, of all that the dtype holds exactly and are not negative.

    ``high`` None with a ``low`` means up to the last that the dtype holds.
    """
    first, stop = low or 0, high if high is not None else integer_count(dtype)
    if not 0 < stop - first <= 1 << 63:
        raise InvalidInputError(f"random_ needs bounds that hold 1 to 2^63 integers, not [{first}, {stop})")
    fill(place, key, lambda words: sample.integers(words, first, stop - first), width=2)


def permutation(key: Key, count: int, device: torch.device) -> torch.Tensor:
    """Return a permutation of ``count`` integers: the order of as many random ones."""
    drawn = torch.empty(count, dtype=torch.int64, device=device)
    fill(place_of_plain(drawn), key, lambda words: sample.integers(words, 0, 1 << 63), width=2)
    return torch.argsort(drawn, stable=True)


def integer_count(dtype: torch.dtype) -> int:
    """Return how many non-negative integers a dtype holds without gaps."""
    if dtype.is_floating_point:
        return 1 + round(2 / torch.finfo(dtype).eps)
    return _INT_COUNT.get(dtype, 1 << 63)


def check_floating(dtype: torch.dtype, what: str) -> None:
    """Refuse a dtype that holds no real numbers.

    Raises:
        InvalidInputError: it is an integer or a complex one.
    """
    if not dtype.is_floating_point:
        raise InvalidInputError(f"{what} is for floating point numbers, not {dtype}; draw two parts of a complex one")


def _below(high: float, dtype: torch.dtype) -> float:
    """Return the largest number of a dtype that is less than ``high``."""
    rounded = torch.tensor(high, dtype=dtype)
    if rounded.item() >= high:
        rounded = torch.nextafter(rounded, torch.tensor(-math.inf, dtype=dtype))
    return float(rounded.item())
