"""A sealed record: a small JSON object whose first field is the BLAKE3 of everything after it.

Refs, tags, abort records and ``store.json`` are such objects: people can read them with any tool, and no flipped byte,
no cut and no addition goes unnoticed. Exactly: ten fixed bytes, 64 lower-case hex digits, then the bytes that they are
the hash of.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from vescale_storage.digest import hexdigest
from vescale_storage.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    FormatError,
    InternalError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedVersionError,
    VeScaleError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vescale_storage.backend import Backend, ObjectInfo

T = TypeVar("T")

RECORD_FORMAT: Final = 1
"""A reader refuses a higher number; a field that it does not know changes nothing of what it knows and is ignored."""
MAX_RECORD_BYTES: Final = 64 * 1024
"""A longer object under a record's key is damage, and is not read."""
MAX_SECONDS: Final = 1e15
"""Bound of times since the epoch: some 30 million years."""

_OPENING: Final = b'{"check":"'
_DIGITS: Final = 64
_MAX_INT_DIGITS: Final = 20
_LIVES: Final = 3
_HEX: Final = re.compile(r"[0-9a-f]*")


def seal(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Return the record's bytes; ``kind`` tells refs from tags and the like. Equal fields make equal bytes."""
    body = json.dumps({"kind": kind, "format": RECORD_FORMAT, **fields}, separators=(",", ":"), allow_nan=False)
    rest = b'",' + body[1:].encode("ascii")
    data = _OPENING + hexdigest(rest).encode("ascii") + rest
    if len(data) > MAX_RECORD_BYTES:
        raise InternalError(f"a {kind} record of {len(data)} bytes is longer than readers accept ({MAX_RECORD_BYTES})")
    return data


def unseal(data: bytes | bytearray, *, kind: str, key: str) -> Fields:
    """Return the fields of a record whose seal holds; ``key`` is where it was found, for the messages.

    Raises:
        CorruptionError: the bytes are not those that were sealed.
        FormatError: they are, but no writer of this format makes them.
        UnsupportedVersionError: a newer writer sealed them.
    """
    digits = data[len(_OPENING) : len(_OPENING) + _DIGITS]
    rest = data[len(_OPENING) + _DIGITS :]
    if len(data) > MAX_RECORD_BYTES or not data.startswith(_OPENING) or hexdigest(rest).encode("ascii") != digits:
        raise CorruptionError(
            f"cannot read {key!r}: the check of this {kind} record of {len(data)} bytes does not hold; it was changed "
            "or cut after it was written",
            key=key,
        )
    fields = Fields(_parse(bytes(data), key), key)
    fields.expect("kind", kind)
    if fields.integer("format", 1, 1 << 31) > RECORD_FORMAT:
        raise UnsupportedVersionError(
            f"cannot read {key!r}: it is a {kind} record of format {fields.integer('format', 1, 1 << 31)}, this reader "
            f"knows {RECORD_FORMAT}; upgrade vescale-ckpt",
            key=key,
        )
    return fields


class Fields:
    """A record's fields, taken out one by one with their type and bounds; each ``Raises`` FormatError."""

    def __init__(self, values: dict[str, Any], key: str) -> None:
        self._values = values
        self.key = key
        """Where the record was found."""

    def text(self, name: str, max_chars: int) -> str:
        """Return a string of at most ``max_chars`` characters that can be encoded as UTF-8."""
        value = self._get(name)
        if not isinstance(value, str) or len(value) > max_chars or not _is_unicode(value):
            self._refuse(name, f"a string of at most {max_chars} characters")
        return value

    def hex(self, name: str, num_digits: int) -> str:
        """Return ``num_digits`` lower-case hex digits."""
        value = self._get(name)
        if not isinstance(value, str) or len(value) != num_digits or not _HEX.fullmatch(value):
            self._refuse(name, f"{num_digits} lower-case hex digits")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an int from ``low`` to ``high``, both included."""
        value = self._get(name)
        if type(value) is not int or not low <= value <= high:
            self._refuse(name, f"an integer from {low} to {high}")
        return value

    def seconds(self, name: str) -> float:
        """Return a time, in seconds since the epoch."""
        value = self._get(name)
        if type(value) not in {int, float} or not 0 <= value < MAX_SECONDS:
            self._refuse(name, "seconds since the epoch")
        return float(value)

    def texts(self, name: str, max_items: int, max_chars: int) -> dict[str, str]:
        """Return an object of strings."""
        value = self._get(name)
        if (
            not isinstance(value, dict)
            or len(value) > max_items
            or not all(isinstance(v, str) and len(v) <= max_chars for v in value.values())
            or not all(_is_unicode(text) for item in value.items() for text in item)
        ):
            self._refuse(name, f"an object of at most {max_items} strings of at most {max_chars} characters")
        return value

    def expect(self, name: str, value: object) -> None:
        """Refuse a field that says another thing than the key under which the record lies.

        Raises:
            CorruptionError: it does: the object was moved here from elsewhere.
        """
        found = self._get(name)
        if type(found) is not type(value) or found != value:
            raise CorruptionError(
                f"cannot read {self.key!r}: its field {name!r} is {_short(found)}, but here it must be {value!r}",
                key=self.key,
            )

    def _get(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise FormatError(f"cannot read {self.key!r}: its field {name!r} is missing", key=self.key) from None

    def _refuse(self, name: str, expected: str) -> NoReturn:
        found = _short(self._values[name])
        raise FormatError(f"cannot read {self.key!r}: its field {name!r} is {found}, expected {expected}", key=self.key)


async def read_bounded(backend: Backend, key: str, max_bytes: int, size_bytes: int | None = None) -> bytearray:
    """Return a whole object of at most ``max_bytes``, without ever holding more than that.

    ``size_bytes`` is its size where a listing has told it; otherwise the storage is asked.

    Raises:
        CorruptionError: the object is longer, or has another size than said.
        ObjectNotFoundError: there is none.
        StorageError: the storage failed.
    """
    if size_bytes is None:
        size_bytes = (await backend.head(key)).size_bytes
    if size_bytes > max_bytes:
        raise CorruptionError(
            f"cannot read {key!r}: it has {size_bytes} bytes, at most {max_bytes} can be right", key=key
        )
    data = bytearray(size_bytes)
    if size_bytes:
        await backend.get_into(key, 0, memoryview(data))
    return data


async def read_listed(backend: Backend, info: ObjectInfo, decode: Callable[[bytearray, str], T]) -> T:
    """Return what ``decode(data, key)`` makes of a record that a listing has told of.

    The size in the listing saves a request. A record may have been deleted and made anew since, with another length:
    what does not fit is read once more, with the size that it has now, before it is called damaged.

    Raises:
        CorruptionError, FormatError, UnsupportedVersionError: as ``decode``.
        ObjectNotFoundError: it was deleted meanwhile.
        StorageError: the storage failed.
    """
    try:
        return decode(await read_bounded(backend, info.key, MAX_RECORD_BYTES, info.size_bytes), info.key)
    except CorruptionError:
        if info.size_bytes > MAX_RECORD_BYTES:
            raise  # no record ever had this size
        return decode(await read_bounded(backend, info.key, MAX_RECORD_BYTES), info.key)


async def read_sealed(backend: Backend, key: str, *, kind: str, size_bytes: int | None = None) -> Fields:
    """Return the fields of the record under ``key``.

    Raises:
        CorruptionError, FormatError, UnsupportedVersionError: as for ``unseal``.
        ObjectNotFoundError: there is none.
        StorageError: the storage failed.
    """
    return unseal(await read_bounded(backend, key, MAX_RECORD_BYTES, size_bytes), kind=kind, key=key)


async def put_once(backend: Backend, key: str, data: bytes) -> bytes | bytearray:
    """Write a small object create-only and return what lies under ``key`` then: ``data``, or what came first.

    The answer to a put can be lost after the put has taken effect; then this finds its own bytes there. So neither
    AlreadyExistsError nor a failure is believed before the object was read back.

    Raises:
        StorageError: the put failed and left nothing.
        CorruptionError: an object that no writer of small records makes is there.
    """
    for _ in range(_LIVES):
        try:
            await backend.put_if_absent(key, [data])
        except AlreadyExistsError:
            pass
        except StorageError as error:
            return await _read_back(backend, key, error)
        else:
            return data
        try:
            return await read_bounded(backend, key, MAX_RECORD_BYTES)
        except ObjectNotFoundError:
            continue  # deleted between the two requests
    raise ConflictError(f"cannot put {key!r}: at each of {_LIVES} tries it existed and was gone again", key=key)


async def _read_back(backend: Backend, key: str, error: StorageError) -> bytearray:
    try:
        return await read_bounded(backend, key, MAX_RECORD_BYTES)
    except VeScaleError:
        raise error from None


def _parse(data: bytes, key: str) -> dict[str, Any]:
    try:
        value = json.loads(
            data.decode("ascii"),
            object_pairs_hook=_refuse_duplicates,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"cannot read {key!r}: its JSON is not acceptable: {error}", key=key) from error
    if not isinstance(value, dict):
        raise FormatError(f"cannot read {key!r}: its JSON is no object", key=key)
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field stands twice in one object")
    return fields


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_INT_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number beyond the range of a double")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"  # printing a deep one could exhaust the stack
    # ascii() and not repr(): what a store says must not reach a terminal as control characters or lone surrogates.
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
