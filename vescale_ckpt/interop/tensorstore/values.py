"""numpy arrays of TensorStore as torch tensors and back, bit by bit; and the library itself, where it is installed."""

from __future__ import annotations

from typing import Any, Final

import torch

from vescale_ckpt.errors import ConfigError, FormatError
from vescale_ckpt.stage.raw import as_integers
from vescale_ckpt.state.dtypes import DTYPE_NAMES, dtype_from_name

_INTEGERS: Final = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}


def library() -> Any:
    """Return the ``tensorstore`` module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tensorstore  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(f"cannot use TensorStore: {error}; pip install 'vescale-ckpt[arrays]'") from error
    return tensorstore


def torch_dtype(name: str, what: str) -> torch.dtype:
    """Return torch's dtype of TensorStore's name.

    Raises:
        FormatError: torch has none.
    """
    if name not in DTYPE_NAMES:
        raise FormatError(f"cannot read {what}: torch has no dtype {name[:40]!r}", path=what)
    return dtype_from_name(name)


def fill(out: torch.Tensor, array: Any) -> None:
    """Copy a numpy array's bits into a tensor of the same width."""
    kind = _INTEGERS.get(out.element_size())
    source = array if kind is None else array.view(kind)
    as_integers(out).copy_(torch.from_numpy(source))


def bits_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's bits as a numpy array of integers."""
    return as_integers(tensor).numpy()
