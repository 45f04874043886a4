"""Which dtypes safetensors has, what torch calls them, and how a shape reads on either side.

The two differ in one place: an element of torch's ``float4_e2m1fn_x2`` is a byte that holds two numbers, and
safetensors counts the numbers.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch


class _Dtype(NamedTuple):
    name: str
    bits: int
    torch_name: str
    """Empty where torch has none."""


_TABLE: Final = (
    _Dtype("BOOL", 8, "bool"),
    _Dtype("U8", 8, "uint8"),
    _Dtype("I8", 8, "int8"),
    _Dtype("U16", 16, "uint16"),
    _Dtype("I16", 16, "int16"),
    _Dtype("U32", 32, "uint32"),
    _Dtype("I32", 32, "int32"),
    _Dtype("U64", 64, "uint64"),
    _Dtype("I64", 64, "int64"),
    _Dtype("F16", 16, "float16"),
    _Dtype("BF16", 16, "bfloat16"),
    _Dtype("F32", 32, "float32"),
    _Dtype("F64", 64, "float64"),
    _Dtype("C64", 64, "complex64"),
    _Dtype("F8_E4M3", 8, "float8_e4m3fn"),
    _Dtype("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    _Dtype("F8_E5M2", 8, "float8_e5m2"),
    _Dtype("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    _Dtype("F8_E8M0", 8, "float8_e8m0fnu"),
    _Dtype("F6_E2M3", 6, ""),
    _Dtype("F6_E3M2", 6, ""),
    _Dtype("F4", 4, "float4_e2m1fn_x2"),
)
_TWO_IN_A_BYTE: Final = "F4"

BITS: Final[dict[str, int]] = {row.name: row.bits for row in _TABLE}
"""Every dtype of the format -> bits of one element."""

_TO_TORCH: Final[dict[str, torch.dtype]] = {
    row.name: getattr(torch, row.torch_name) for row in _TABLE if row.torch_name and hasattr(torch, row.torch_name)
}
_FROM_TORCH: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _TO_TORCH.items()}


def torch_dtype(name: str) -> torch.dtype | None:
    """Return torch's dtype for a safetensors name, None where this torch has none."""
    return _TO_TORCH.get(name)


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """Return the safetensors name of a dtype, None where the format has none."""
    return _FROM_TORCH.get(dtype)


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that torch gives to a tensor of a file, None where it cannot hold it."""
    if name != _TWO_IN_A_BYTE:
        return shape
    if not shape or shape[-1] % 2:
        return None
    return (*shape[:-1], shape[-1] // 2)


def file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that a torch tensor has in a file, None where the file cannot hold it."""
    if name != _TWO_IN_A_BYTE:
        return shape
    return (*shape[:-1], shape[-1] * 2) if shape else None


def num_bytes(name: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor with this shape in a file, None where they are not whole."""
    num_bits = math.prod(shape) * BITS[name]
    return None if num_bits % 8 else num_bits // 8
