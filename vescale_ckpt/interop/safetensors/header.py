"""The header of a safetensors file: parsed as from a stranger, and written.

A file is 8 bytes of header length (little-endian), the header (JSON), and the tensors' bytes. What is accepted is what
the format's own library accepts, and a little less: every byte belongs to exactly one tensor, names come once, nothing
but the fields of the format is there. Nothing is allocated by what a header claims before it fits the file.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import CorruptionError, FormatError, InvalidInputError
from vescale_ckpt.format.json_text import encode_json
from vescale_ckpt.interop.safetensors.dtypes import BITS, num_bytes
from vescale_ckpt.state.keys import is_unicode
from vescale_ckpt.state.tree import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""
METADATA_KEY: Final = "__metadata__"
LENGTH_BYTES: Final = 8
_ALIGN_BYTES: Final = 8
_MAX_NDIM: Final = 64
_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's name: ``F32``, ``BF16``, ``F8_E4M3``, ..."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the end of the header."""
    stop: int
    """First byte past it."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a file says of itself, all of it checked."""

    tensors: Mapping[str, TensorEntry]
    """By name, in the order of the header."""
    metadata: Mapping[str, str]
    data_start: int
    """Where the tensors' bytes begin in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())


def header_length(first: bytes, file_bytes: int, what: str) -> int:
    """Return the length of the header that the first 8 bytes of a file announce.

    Raises:
        FormatError: this cannot be a safetensors file.
        CorruptionError: the file is shorter than its header.
    """
    if len(first) < LENGTH_BYTES:
        raise CorruptionError(
            f"cannot read {what}: it has {file_bytes} bytes; a safetensors file has at least {LENGTH_BYTES + 2}",
            path=what,
        )
    (length,) = struct.unpack("<Q", first[:LENGTH_BYTES])
    if length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        return int(length)
    if first.startswith(b"PK\x03\x04"):
        raise FormatError(f"cannot read {what}: it is a zip archive, as torch.save writes, no safetensors", path=what)
    announced = f"cannot read {what}: it announces a header of {length} bytes"
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"{announced}, the format allows {MAX_HEADER_BYTES}; it is no safetensors file, or damaged", path=what
        )
    raise CorruptionError(f"{announced} and has {file_bytes} in all; it was cut, or is no safetensors file", path=what)


def parse_header(text: bytes, data_bytes: int, what: str) -> SafetensorsHeader:
    """Return the checked header.

    Args:
        text: the JSON.
        data_bytes: how many bytes follow it in the file.
        what: the file, for messages.

    Raises:
        FormatError: no writer of the format makes this.
        CorruptionError: the tensors it lists and the bytes of the file do not fit.
    """
    raw = _decode(text, what)
    metadata = _metadata(raw.pop(METADATA_KEY, {}), what)
    tensors: dict[str, TensorEntry] = {}
    for name, fields in raw.items():
        tensors[name] = _entry(name, fields, what)
    _check_cover(tensors.values(), data_bytes, what)
    return SafetensorsHeader(tensors, metadata, LENGTH_BYTES + len(text))


def encode_header(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file, up to where the tensors begin; that is a multiple of 8.

    Raises:
        InvalidInputError: there is too much to say.
    """
    fields: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    for entry in entries:
        offsets = [entry.start, entry.stop]
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = encode_json(fields)
    text += b" " * (-len(text) % _ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidInputError(
            f"cannot write {len(fields)} tensors to one safetensors file: its header would have {len(text)} bytes, "
            f"{MAX_HEADER_BYTES} are allowed; write smaller files"
        )
    return struct.pack("<Q", len(text)) + text


def _decode(text: bytes, what: str) -> dict[str, Any]:
    """Return the outermost object: names and, for each, ``_Fields`` or, for the metadata, a dict.

    Raises:
        FormatError: it is no such JSON.
    """
    problem = ""
    raw: dict[str, Any] = {}
    try:
        if not text.startswith(b"{"):
            problem = f"starts with {text[:8]!r} and not with '{{'"
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_Objects(), parse_float=_no_number, parse_constant=_no_number
        )
        if type(value) is dict:
            raw = value
        else:  # the fields of a tensor, without its name
            problem = problem or "lists no tensors by name"
    except RecursionError:
        problem = problem or "is nested without end"
    except ValueError as error:  # also of UTF-8, and of integers of thousands of digits
        problem = problem or f"is no JSON of this format: {str(error)[:200]}"
    if problem:
        raise FormatError(f"cannot read {what}: its header {problem}", path=what)
    return raw


class _Fields(tuple[tuple[str, Any], ...]):
    """The fields of one tensor, not checked yet."""

    __slots__ = ()


class _Objects:
    """Takes the objects of a header as they are closed, the inner ones first.

    Hostile JSON is refused here, before its values pile up: an object is the fields of a tensor, or the metadata, or
    the outermost one.
    """

    def __init__(self) -> None:
        self._num_others = 0
        """Objects that are not the fields of a tensor."""

    def __call__(self, pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"the name {shorten(_twice(pairs))} comes twice in one object")
        if found.keys() == _FIELDS and not isinstance(found["dtype"], _Fields):
            return _Fields(pairs)
        odd = next((name for name in found if not is_unicode(name)), None)
        if odd is not None:
            raise ValueError(f"the name {shorten(odd)} is no text")
        self._num_others += 1
        if self._num_others > 2:
            raise ValueError("it has objects that are neither a tensor's fields nor the metadata")
        if not all(isinstance(value, str) for value in found.values()):  # then it is not the metadata
            for name, value in found.items():
                if not isinstance(value, _Fields) and name != METADATA_KEY:
                    raise ValueError(f"{shorten(name)} has not exactly the fields dtype, shape and data_offsets")
        return found


def _twice(pairs: list[tuple[str, Any]]) -> str:
    """Return a name that comes twice."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _no_number(text: str) -> Any:
    raise ValueError(f"the number {text[:40]!r} is no integer")


def _metadata(value: Any, what: str) -> dict[str, str]:
    metadata = dict(value) if isinstance(value, dict | _Fields) else None
    if metadata is None or not all(type(text) is str and is_unicode(text) for text in metadata.values()):
        raise FormatError(f"cannot read {what}: its {METADATA_KEY} does not map names to texts", path=what)
    return metadata


def _entry(name: str, fields: Any, what: str) -> TensorEntry:
    if not isinstance(fields, _Fields):
        raise FormatError(f"cannot read {what}: {shorten(name)} is not described as a tensor", path=what, fqn=name)
    values = dict(fields)
    dtype, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    problem = ""
    if not isinstance(dtype, str) or dtype not in BITS:
        problem = f"has the dtype {shorten(dtype)}, which the format does not have"
    elif not _are_sizes(shape) or len(shape) > _MAX_NDIM:
        problem = f"has the shape {shorten(shape)}"
    elif not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problem = f"has the byte range {shorten(offsets)}"
    if problem:
        raise FormatError(f"cannot read {what}: {shorten(name)} {problem}", path=what, fqn=name)
    entry = TensorEntry(name, dtype, tuple(shape), *offsets)
    needed = num_bytes(dtype, entry.shape)
    if needed != entry.num_bytes:
        takes = "no whole number of bytes" if needed is None else f"{needed} bytes"
        raise CorruptionError(
            f"cannot read {what}: {shorten(name)} is {dtype} {entry.shape}, which takes {takes}, and its byte range "
            f"[{entry.start}, {entry.stop}) has {entry.num_bytes}",
            path=what,
            fqn=name,
        )
    return entry


def _are_sizes(value: Any) -> bool:
    return type(value) is list and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_cover(entries: Iterable[TensorEntry], data_bytes: int, what: str) -> None:
    """Refuse bytes that belong to no tensor, or to two."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            how = "leaves a hole after" if entry.start > end else "overlaps"
            raise CorruptionError(
                f"cannot read {what}: {shorten(entry.name)} starts at byte {entry.start} of the data and {how} what "
                f"ends at {end}",
                path=what,
                fqn=entry.name,
            )
        end = entry.stop
    if end != data_bytes:
        how = "was cut" if end > data_bytes else "has bytes that belong to no tensor"
        raise CorruptionError(
            f"cannot read {what}: its tensors end at byte {end} of the data and {data_bytes} are there; it {how}",
            path=what,
        )
