"""Difference: how far apart the values of two tensors are, added up block by block. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vescale_ckpt.compare.statistics import as_float64
from vescale_ckpt.errors import InvalidInputError


@dataclass(slots=True)
class Difference:
    """How two tensors of one shape differ.

    A NaN is equal to a NaN, and an infinity to the same one. Where only one of two values is a NaN, or they are
    different infinities, they differ by infinity.
    """

    num: int = 0
    num_different: int = 0
    """Values that are not equal."""
    same_bits: bool = True
    """Whether dtypes and all bytes are the same; -0.0 and 0.0 are equal values of different bits."""
    max_abs: float = 0.0
    """Largest distance of two values."""
    max_rel: float = 0.0
    """Largest distance in parts of the larger of the two magnitudes: 0 to 2, or infinity."""
    at: tuple[int, ...] | None = None
    """Index, in the whole tensor, of the first value with the largest distance."""

    def add(self, a: torch.Tensor, b: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Compare a block of both, which begins at ``offset``.

        Raises:
            InvalidInputError: they differ, and torch cannot convert their dtype to numbers.
        """
        self.num += a.numel()
        if a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)):
            return
        self.same_bits = False
        different = _is_different(a, b)
        num_different = int(different.sum())
        if not num_different:
            return
        self.num_different += num_different
        distance, relative = _distances(a, b, different)
        largest, place = distance.reshape(-1).max(dim=0)
        if self.at is None or float(largest) > self.max_abs:
            self.max_abs = float(largest)
            self.at = _index(int(place), tuple(a.shape), offset)
        self.max_rel = max(self.max_rel, float(relative.max()))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where values are not equal; exact for integers of 64 bits too."""
    if a.dtype == b.dtype and not (a.dtype.is_floating_point or a.dtype.is_complex):
        return a != b
    left, right = _numbers(a), _numbers(b)
    return (left != right) & ~(left.isnan() & right.isnan())


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128) if values.dtype.is_complex else as_float64(values)


def _distances(a: torch.Tensor, b: torch.Tensor, different: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return absolute and relative distances, 0 where values are equal."""
    left, right = _numbers(a), _numbers(b)
    if left.is_complex() != right.is_complex():
        left, right = left.to(torch.complex128), right.to(torch.complex128)
    distance = (left - right).abs()
    distance = torch.where(distance.isnan(), torch.inf, distance)
    magnitude = torch.maximum(left.abs().nan_to_num(posinf=torch.inf), right.abs().nan_to_num(posinf=torch.inf))
    relative = torch.where(distance.isinf(), torch.inf, distance / magnitude)
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(different, distance, zero), torch.where(different, relative, zero)


def _index(place: int, shape: tuple[int, ...], offset: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        index.append(at)
    return tuple(at + start for at, start in zip(reversed(index), offset, strict=True))


def is_comparable(a: torch.dtype, b: torch.dtype) -> bool:
    """Return whether the values of two dtypes can be compared as numbers."""
    try:
        for dtype in (a, b):
            as_float64(torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype))
    except InvalidInputError:
        return False
    return True
