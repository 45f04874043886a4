"""Names of the dtypes that a store holds, and the bytes of one element, both asked of torch itself.

The list is closed because it is part of the format: what torch adds later is added here on purpose. Nothing passes
through numpy, which knows neither bfloat16 nor any 8-bit float.
"""

from __future__ import annotations

from typing import Final

import torch

from vescale_ckpt.errors import ConfigError, FormatError

_NAMES: Final = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",  # torch's element is the byte that holds two numbers, and shapes count those
)

_BY_NAME: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_BY_DTYPE: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _BY_NAME.items()}

DTYPE_NAMES: Final = frozenset(_BY_NAME)
"""What this torch can store and load."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the stored name of a dtype: torch's own, without ``torch.``.

    Raises:
        ConfigError: no store holds arrays of this dtype; says what to store instead.
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise ConfigError(f"cannot store tensors of dtype {dtype}: {_why_not(str(dtype))}", dtype=str(dtype))
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a stored name; aliases such as ``float`` or ``half`` are no names.

    Raises:
        FormatError: the name is not one that this version of torch and of the format know.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        known = ", ".join(_BY_NAME)
        raise FormatError(
            f"cannot read a tensor of dtype {name[:80]!r}: torch {torch.__version__} and this format know {known}; "
            "a newer torch may know it",
            dtype=name,
        )
    return dtype


def item_bytes(name: str) -> int:
    """Return the bytes of one element of a stored dtype name.

    Raises:
        FormatError: as ``dtype_from_name``.
    """
    return dtype_from_name(name).itemsize


def _why_not(name: str) -> str:
    """Return why a dtype is not stored and the way out."""
    short = name.removeprefix("torch.")
    if short.startswith(("qint", "quint")):
        return "quantized tensors carry scales beside their bytes; store int_repr(), q_scale() and q_zero_point()"
    if short.startswith(("int", "uint", "bits")):
        return "its elements are not whole bytes or cannot be copied; store a uint8 view and the dtype beside it"
    return "this version of the format does not know it; store a uint8 view of it and the dtype beside it"
