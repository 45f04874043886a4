"""Which plain values a state tree may hold, and the way from Python's, torch's and numpy's objects to them and back.

A value comes back with the type and the bits it had, or it is refused when it is saved, with an error that says where
it is and what to do: nothing is turned into something similar, and nothing is pickled.
"""

from __future__ import annotations

import datetime as dt
import enum
import functools
import pathlib
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.state.keys import check_key, is_unicode, place, type_name
from vescale_ckpt.state.tree import Foreign, fqn, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_ckpt.state.tree import Path

__all__ = ["MAX_VALUE_BYTES", "PLAIN_TYPES", "check_key", "from_value", "hint", "to_value", "type_name"]

PLAIN_TYPES: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Held as they are. Exactly these: a subclass would come back as its base."""

MAX_VALUE_BYTES: Final = 16 * 2**20
"""A larger str, bytes or int is refused: every rank reads the tree as a whole. Arrays have no such bound."""

_TORCH_NAMED: Final[dict[str, type]] = {
    "torch.dtype": torch.dtype,
    "torch.layout": torch.layout,
    "torch.memory_format": torch.memory_format,
}
_NUMPY_SCALARS: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,5})?")
_SIZE: Final = re.compile(r"(-?[0-9]{1,19}(,-?[0-9]{1,19}){0,63})?")
_HINTS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (torch.Tensor, "tensors are leaves of their own and no plain values"),
    (np.ndarray, "arrays are leaves of their own and no plain values"),
    (enum.Enum, "store its .value or .name"),
    (
        (dt.date, dt.time, dt.timedelta, np.datetime64, np.timedelta64),
        "store a timestamp, seconds or ISO text",
    ),
    (pathlib.PurePath, "store str() of it"),
    ((set, frozenset), "store a sorted list"),
    ((bytearray, memoryview), "store bytes() of it"),
    (range, "store a list or a tuple of its start, stop and step"),
    (
        (torch.Generator, np.random.Generator, np.random.RandomState),
        "store its state: get_state() or bit_generator.state",
    ),
    (np.generic, "store a Python number or a numpy scalar of a plain type"),
    (type, "store its name; a checkpoint holds no code"),
    ((str, bytes, int, float, complex), "a subclass would come back as its base: convert it to that yourself"),
    (tuple, "named tuples would come back without names: store _asdict() or tuple() of it"),
    (list, "a subclass would come back as a list: store list() of it"),
    (dict, "a subclass would come back as a dict: store dict() of it"),
)


def to_value(obj: Any, path: Path = ()) -> Any:
    """Return the plain value of an object, for a ``ValueNode``.

    Raises:
        InvalidInputError: no tree may hold it; names the path, the type and the way out.
    """
    cls = obj.__class__
    if cls in PLAIN_TYPES:
        if _size_bytes(obj) > MAX_VALUE_BYTES:
            raise InvalidInputError(
                f"cannot store {cls.__name__} at {place(path)}: it is larger than {MAX_VALUE_BYTES} bytes; "
                "store it as a uint8 tensor",
                fqn=fqn(path),
            )
        return obj
    wrap = _WRAP.get(cls)
    value = wrap(obj) if wrap else _numpy_scalar(obj) if isinstance(obj, np.generic) else None
    if value is None:
        raise InvalidInputError(
            f"cannot store {type_name(obj)} at {place(path)}: {hint(obj)}", fqn=fqn(path), type=type_name(obj)
        )
    return value


def from_value(value: Any) -> Any:
    """Return the object that ``to_value`` was given.

    Raises:
        FormatError: a value of another library that the installed version of it does not know.
    """
    if not isinstance(value, Foreign):
        return value
    try:
        unwrap = _UNWRAP[value.kind]
        return unwrap(value.text)
    except (KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise FormatError(
            f"cannot make the stored value {shorten(value)}: torch {torch.__version__} with numpy {np.__version__} "
            "does not know it; read the snapshot where it is known",
            kind=value.kind,
        ) from error


def hint(obj: Any) -> str:
    """Return what to do about an object that no tree may hold."""
    for cls, advice in _HINTS:
        if isinstance(obj, cls):
            return advice
    if callable(obj):
        return "a checkpoint holds no code; store a name"
    return "give it state_dict() and load_state_dict() of plain values and tensors, and store what state_dict() returns"


def _size_bytes(obj: Any) -> int:
    """Return about what a plain value needs, at least its true size."""
    if isinstance(obj, str):
        return len(obj) * (1 if obj.isascii() else 4)
    if isinstance(obj, bytes):
        return len(obj)
    return obj.bit_length() // 8 if isinstance(obj, int) else 0


def _numpy_scalar(obj: np.generic) -> Foreign | None:
    """Return a numpy scalar by name and little-endian bytes, or None for what is no plain number or text."""
    if type(obj) is np.str_:
        return Foreign("numpy.str_", str(obj)) if is_unicode(str(obj)) else None
    if type(obj) is np.bytes_:
        return Foreign("numpy.bytes_", bytes(obj).hex())
    dtype = obj.dtype  # long double is in no list: it has another size on every platform
    if dtype.name not in _NUMPY_SCALARS or type(obj) is not dtype.type:
        return None
    return Foreign(f"numpy.{dtype.name}", np.asarray(obj, dtype.newbyteorder("<")).tobytes().hex())


def _make_numpy_scalar(name: str) -> Callable[[str], Any]:
    dtype = np.dtype(name)

    def make(text: str) -> Any:
        raw = bytes.fromhex(text)
        if len(raw) != dtype.itemsize or raw.hex() != text or (name == "bool" and raw > b"\x01"):
            raise ValueError(text)
        return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)[0]

    return make


def _make_torch_named(cls: type) -> Callable[[str], Any]:
    def make(text: str) -> Any:
        return _torch_names(cls)[text]

    return make


@functools.cache
def _torch_names(cls: type) -> dict[str, Any]:
    """Return torch's objects of a type by name: a table, so that no text from a file is ever looked up in a module."""
    return {str(obj).removeprefix("torch."): obj for obj in vars(torch).values() if isinstance(obj, cls)}


def _make_device(text: str) -> torch.device:
    if not _DEVICE.fullmatch(text):
        raise ValueError(text)
    return torch.device(text)


def _make_size(text: str) -> torch.Size:
    if not _SIZE.fullmatch(text):
        raise ValueError(text)
    sizes = [int(part) for part in text.split(",") if part]
    if not all(-(2**63) <= size < 2**63 for size in sizes):
        raise ValueError(text)
    return torch.Size(sizes)


def _torch_named(obj: Any) -> Foreign:
    return Foreign(f"torch.{type(obj).__name__}", str(obj).removeprefix("torch."))


_WRAP: Final[dict[type, Callable[[Any], Foreign]]] = {
    torch.device: lambda obj: Foreign("torch.device", str(obj)),
    torch.Size: lambda obj: Foreign("torch.Size", ",".join(str(int(n)) for n in obj)),
    **dict.fromkeys(_TORCH_NAMED.values(), _torch_named),
}

_UNWRAP: Final[dict[str, Callable[[str], Any]]] = {
    "torch.device": _make_device,
    "torch.Size": _make_size,
    **{kind: _make_torch_named(cls) for kind, cls in _TORCH_NAMED.items()},
    **{f"numpy.{name}": _make_numpy_scalar(name) for name in _NUMPY_SCALARS},
    "numpy.str_": np.str_,
    "numpy.bytes_": lambda text: np.bytes_(bytes.fromhex(text)),
}
