"""Pickles written without Python's pickler: plain values, tensors by reference, and records of named classes.

Protocol 2, as ``torch.save`` writes, with the opcodes that ``torch.load(weights_only=True)`` takes. The same value
always gives the same bytes, so that a file can be planned before it is written.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import torch

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.interop.foreign.pickles import Named, Record
from vescale_ckpt.interop.torchsave.allowed import STORAGES, StoredTensor

_BATCH: Final = 1000
_MAX_DEPTH: Final = 200


def encode_pickle(value: Any) -> bytes:
    """Return the pickle of a value made of plain values, dtypes, ``StoredTensor``, ``Named`` and ``Record``.

    Raises:
        InvalidInputError: it holds anything else.
    """
    out = bytearray(b"\x80\x02")
    _write(out, value, 0)
    return bytes(out + b".")


def _write(out: bytearray, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise InvalidInputError("cannot write a value that is nested without end")
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise InvalidInputError(f"cannot write a {type(value).__name__} to a pickle: only plain values and tensors")
    writer(out, value, depth)


def _global(out: bytearray, module: str, name: str) -> None:
    out += f"c{module}\n{name}\n".encode()


def _bool(out: bytearray, value: bool, _: int) -> None:
    out += b"\x88" if value else b"\x89"


def _int(out: bytearray, value: int, _: int) -> None:
    if 0 <= value < 256:
        out += b"K" + bytes([value])
    elif -(2**31) <= value < 2**31:
        out += b"J" + struct.pack("<i", value)
    else:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) > 255:
            raise InvalidInputError(f"cannot write an integer of {value.bit_length()} bits")
        out += b"\x8a" + bytes([len(raw)]) + raw


def _float(out: bytearray, value: float, _: int) -> None:
    out += b"G" + struct.pack(">d", value)


def _str(out: bytearray, value: str, _: int) -> None:
    raw = value.encode("utf-8", "surrogatepass")
    out += b"X" + struct.pack("<I", len(raw)) + raw


def _bytes(out: bytearray, value: bytes, depth: int) -> None:
    _global(out, "_codecs", "encode")
    _write(out, (value.decode("latin-1"), "latin1"), depth + 1)
    out += b"R"


def _dict(out: bytearray, value: dict[Any, Any], depth: int) -> None:
    out += b"}"
    items = list(value.items())
    for start in range(0, len(items), _BATCH):
        out += b"("
        for key, child in items[start : start + _BATCH]:
            _write(out, key, depth + 1)
            _write(out, child, depth + 1)
        out += b"u"


def _list(out: bytearray, value: list[Any], depth: int) -> None:
    out += b"]"
    for start in range(0, len(value), _BATCH):
        out += b"("
        for child in value[start : start + _BATCH]:
            _write(out, child, depth + 1)
        out += b"e"


def _tuple(out: bytearray, value: tuple[Any, ...], depth: int) -> None:
    if not value:
        out += b")"
        return
    out += b"("
    for child in value:
        _write(out, child, depth + 1)
    out += b"t"


def _size(out: bytearray, value: torch.Size, depth: int) -> None:
    _global(out, "torch", "Size")
    out += b"("
    _tuple(out, tuple(value), depth + 1)
    out += b"tR"


def _set(out: bytearray, value: Any, depth: int) -> None:
    _global(out, "__builtin__", type(value).__name__)
    out += b"("
    _list(out, sorted(value, key=repr), depth + 1)
    out += b"tR"


def _dtype(out: bytearray, value: torch.dtype, _: int) -> None:
    _global(out, "torch", str(value).removeprefix("torch."))


def _named(out: bytearray, value: Named, _: int) -> None:
    _global(out, value.module, value.name)


def _record(out: bytearray, value: Record, depth: int) -> None:
    _named(out, value.cls, depth)
    _tuple(out, value.args, depth + 1)
    out += b"R" if value.args else b"\x81"
    state = value.raw_state if value.raw_state is not None else value.state
    if state:
        _write(out, state, depth + 1)
        out += b"b"


def _tensor(out: bytearray, value: StoredTensor, depth: int) -> None:
    name = STORAGES.get(value.dtype)
    _global(out, "torch._utils", "_rebuild_tensor_v2" if name else "_rebuild_tensor_v3")
    out += b"(("
    _str(out, "storage", depth)
    _global(out, *(("torch", name) if name else ("torch.storage", "UntypedStorage")))
    _str(out, value.storage.key, depth)
    _str(out, "cpu", depth)
    _int(out, value.storage.numel * (1 if name else value.dtype.itemsize), depth)
    out += b"tQ"
    _int(out, value.offset, depth)
    _tuple(out, value.shape, depth)
    _tuple(out, value.strides, depth)
    out += b"\x89"
    _global(out, "collections", "OrderedDict")
    out += b")R"
    if not name:
        _dtype(out, value.dtype, depth)
    out += b"tR"


_WRITERS: Final[dict[type, Any]] = {
    type(None): lambda out, *_: out.extend(b"N"),
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    bytes: _bytes,
    dict: _dict,
    list: _list,
    tuple: _tuple,
    torch.Size: _size,
    set: _set,
    frozenset: _set,
    torch.dtype: _dtype,
    Named: _named,
    Record: _record,
    StoredTensor: _tensor,
}
