"""Tensors seen as raw bytes: the one place where a dtype is looked through.

Copies go through integers of the same width, so that every bit survives (NaN payloads, negative zeros, all fp8 codes).
"""

from __future__ import annotations

from typing import Any

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ALIGN_BYTES = 64
"""Where items begin in a buffer: a multiple of every item size and of a cache line."""


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGN_BYTES``."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory as integers of the same width (16-byte items stay as they are)."""
    integer = _INTEGER.get(tensor.dtype.itemsize)
    if integer is None or tensor.dtype is integer:
        return tensor
    return tensor.view(integer)


def shaped(buffer: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the part of a byte buffer from ``start`` on as a row-major tensor of integers as wide as ``dtype``."""
    integer = _INTEGER.get(dtype.itemsize, dtype)
    count = 1
    for size in shape:
        count *= size
    return buffer[start : start + count * dtype.itemsize].view(integer).view(shape)


def memory_of(buffer: torch.Tensor) -> memoryview:
    """Return the bytes of a host buffer (uint8, 1-D) as a memoryview of the same memory."""
    array: Any = buffer.numpy()
    return memoryview(array)
