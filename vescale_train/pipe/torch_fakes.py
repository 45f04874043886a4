"""Private names of torch that stand-ins use: tensors with shapes and no data. Kept in one file, with a version test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NEEDS_DATA", "StandIns", "is_stand_in", "storage_key"]

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What is raised when somebody asks a stand-in for its data."""


class StandIns:
    """Makes tensors that have a shape, a dtype and a device, but no data; operations on them only work out shapes."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(
        self, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new stand-in."""
        with self._mode:
            if stride is None:
                return torch.empty(tuple(shape), dtype=dtype, device=device)
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def is_stand_in(value: Any) -> bool:
    """Return whether something is a tensor without data."""
    return isinstance(value, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tensors that share memory have in common, while they live."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - this is the file for it
