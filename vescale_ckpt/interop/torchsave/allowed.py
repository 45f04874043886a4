"""What a checkpoint's pickle may name, and what is made of it: plain values, and tensors that lie in the archive.

The list is closed. Classes of other libraries that are only data are added by name by the reader that knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.pickles import Named, Record, make_record
from vescale_ckpt.state.dtypes import DTYPE_NAMES, dtype_from_name


@dataclass(frozen=True, slots=True)
class StoredStorage:
    """A storage of the archive."""

    key: str
    dtype: torch.dtype | None
    """None for one without a type."""
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a view of a storage."""

    storage: StoredStorage
    dtype: torch.dtype
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Make = Callable[[Named, tuple[Any, ...]], Any]

_STORAGES: Final = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}  # fmt: skip
_STORAGE_DTYPES: Final[dict[str, torch.dtype | None]] = {
    **{f"torch.{name}Storage": dtype_from_name(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": None,
    "torch.UntypedStorage": None,
}
STORAGES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {dtype_from_name(dtype): f"{name}Storage" for name, dtype in _STORAGES.items()}
)
"""Dtypes that have a storage class of their own -> its name in ``torch``."""
DTYPES: Final[Mapping[str, Any]] = MappingProxyType({f"torch.{name}": dtype_from_name(name) for name in DTYPE_NAMES})
"""Names that stand for themselves."""


def storage_of(key: Any) -> StoredStorage:
    """Return the storage that a persistent id means.

    Raises:
        FormatError: it means none.
    """
    if key.__class__ is tuple and len(key) >= 5 and key[0] == "storage" and key[1].__class__ is Named:
        _, named, name, _, numel = key[:5]
        if named.full in _STORAGE_DTYPES and type(name) is str and type(numel) is int and numel >= 0:
            return StoredStorage(name, _STORAGE_DTYPES[named.full], numel)
    raise FormatError("a persistent id means no storage")


def _sizes(value: Any) -> tuple[int, ...]:
    sizes: tuple[int, ...] = tuple(value) if isinstance(value, tuple | list) else (-1,)
    if len(sizes) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in sizes):
        raise FormatError("a tensor has impossible sizes")
    return sizes


def _tensor(named: Named, args: tuple[Any, ...]) -> StoredTensor:
    storage, offset, shape, strides = args[:4]
    dtype = args[6] if named.name == "_rebuild_tensor_v3" else getattr(storage, "dtype", None)
    if not isinstance(storage, StoredStorage) or type(offset) is not int or not isinstance(dtype, torch.dtype):
        raise FormatError("a tensor is made of what is no storage")
    return StoredTensor(storage, dtype, offset, _sizes(shape), _sizes(strides))


def _parameter(_: Named, args: tuple[Any, ...]) -> StoredTensor:
    if not args or not isinstance(args[0], StoredTensor):
        raise FormatError("a parameter is made of what is no tensor")
    return args[0]


def _dict(_: Named, args: tuple[Any, ...]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for pair in args[0] if args and isinstance(args[0], list) else ():
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str | int):
            raise FormatError("a dict is made of what are no pairs")
        made[pair[0]] = pair[1]
    return made


def _default_dict(_: Named, __: tuple[Any, ...]) -> dict[Any, Any]:
    return {}


def _encoded(_: Named, args: tuple[Any, ...]) -> bytes:
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in {"latin1", "latin-1"}:
        raise FormatError("bytes are made of what is no text")
    return args[0].encode("latin-1")


def _items(named: Named, args: tuple[Any, ...]) -> Any:
    found = args[0] if args else b"" if named.name in {"bytes", "bytearray"} else ()
    if not isinstance(found, list | tuple | set | frozenset | bytes):
        raise FormatError(f"a {named.name} is made of a {type(found).__name__}")
    return {"set": set, "frozenset": frozenset, "list": list, "tuple": tuple, "bytearray": bytes, "bytes": bytes}[
        named.name
    ](found)


def _size(_: Named, args: tuple[Any, ...]) -> torch.Size:
    return torch.Size(_sizes(args[0] if args else ()))


def _text(_: Named, args: tuple[Any, ...]) -> str:
    return "/".join(str(part)[:4096] for part in args)


def _first(_: Named, args: tuple[Any, ...]) -> Any:
    return args[0] if args else None


_NUMPY: Final = {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool", **{
    f"{kind}{width}": f"{'u' * (kind == 'u')}int{8 * width}" for kind in "iu" for width in (1, 2, 4, 8)
}}  # fmt: skip


def _numpy_scalar(_: Named, args: tuple[Any, ...]) -> Any:
    kind = args[0].args[0] if args and isinstance(args[0], Record) and args[0].args else None
    order = args[0].raw_state[1] if isinstance(args[0].raw_state, tuple) and len(args[0].raw_state) > 1 else "<"
    if kind not in _NUMPY or len(args) != 2 or order == ">":
        raise FormatError(f"a numpy scalar of the type {str(kind)[:40]!r} is nothing that is read here")
    data = args[1].encode("latin-1") if isinstance(args[1], str) else args[1]
    dtype = dtype_from_name(_NUMPY[kind])
    if not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise FormatError("a numpy scalar has the wrong number of bytes")
    return torch.frombuffer(bytearray(data), dtype=dtype).item()


BASE: Final[Mapping[str, Make]] = MappingProxyType(
    {
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        **dict.fromkeys(_STORAGE_DTYPES, make_record),
        "torch.Size": _size,
        "torch.device": _text,
        "torch.serialization._get_layout": _text,
        "collections.OrderedDict": _dict,
        "collections.defaultdict": _default_dict,
        "collections.Counter": _first,
        "builtins.set": _items,
        "builtins.frozenset": _items,
        "builtins.list": _items,
        "builtins.tuple": _items,
        "builtins.bytearray": _items,
        "builtins.bytes": _items,
        "builtins.dict": _dict,
        "builtins.int": _first,
        "builtins.float": _first,
        "_codecs.encode": _encoded,
        "pathlib.PosixPath": _text,
        "pathlib.PurePosixPath": _text,
        "pathlib._local.PosixPath": _text,
        "numpy.core.multiarray.scalar": _numpy_scalar,
        "numpy.dtype": make_record,
    }
)
"""What ``torch.load(weights_only=True)`` takes too, and nothing else."""


def with_records(*names: str, base: Mapping[str, Make] = BASE) -> Mapping[str, Make]:
    """Return a list with some more classes, whose objects are only data."""
    return MappingProxyType({**base, **dict.fromkeys(names, make_record)})


def with_makers(makers: Mapping[str, Make], base: Mapping[str, Make] = BASE) -> Mapping[str, Make]:
    """Return a list with some more makers."""
    return MappingProxyType({**base, **makers})


__all__ = ["BASE", "DTYPES", "STORAGES", "StoredStorage", "StoredTensor", "storage_of", "with_makers", "with_records"]
