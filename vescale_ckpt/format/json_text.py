"""JSON as the format uses it: canonical when written, and read as from a stranger.

Written: UTF-8, no space, only the escapes that JSON demands, so that equal values give equal bytes. Read: names that
come twice, numbers that are not finite, half characters and bottomless nesting are refused with a ``FormatError``.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.state.keys import is_unicode, type_name

if TYPE_CHECKING:
    from vescale_storage.backend import Buffer

T = TypeVar("T")

_MAX_DEPTH: Final = 32
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def encode_json(value: Any) -> bytes:
    """Return the canonical JSON text of a value; dicts keep their order."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False).encode()


def decode_json(data: Buffer, what: str, *, floats: bool) -> Any:
    """Return the value of a JSON text; ``what`` names it in errors.

    Raises:
        FormatError: it is no such JSON.
    """
    try:
        text = str(data, "utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_finite if floats else _no_float,
            parse_constant=_no_float,
        )
        if "\\u" in text:  # a canonical text has such escapes for control characters only
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise FormatError(f"cannot read {what}: its JSON is nested without end") from error
    except ValueError as error:  # also of UTF-8, and of integers of thousands of digits
        raise FormatError(f"cannot read {what}: it is no JSON of this format: {str(error)[:200]}") from error
    return value


def take(fields: Any, name: str, cls: type[T], what: str) -> T:
    """Return the field of a decoded JSON object, which must be there and of exactly this class.

    Raises:
        FormatError: it is not.
    """
    if fields.__class__ is not dict:
        raise FormatError(f"cannot read {what}: a JSON object was expected, not {type_name(fields)}")
    value = fields.get(name)
    if value.__class__ is not cls:
        found = f"is of type {type_name(value)}" if name in fields else "is not there"
        raise FormatError(f"cannot read {what}: the field {name!r} {found}; {cls.__name__} was expected")
    return value


def take_number(fields: Any, name: str, what: str) -> float:
    """Return the field of a decoded JSON object, which must be there and a number.

    Raises:
        FormatError: it is not.
    """
    if fields.__class__ is dict and fields.get(name).__class__ is int:
        number: int = fields[name]
        if _MIN_INT <= number <= _MAX_INT:
            return float(number)
    return take(fields, name, float, what)


def check_json(value: Any, what: str, depth: int = 0) -> None:
    """Refuse what JSON would not give back the same: other types, other keys, NaN, huge integers, deep nesting.

    Raises:
        InvalidInputError: names the place.
    """
    problem = ""
    match value:
        case None | bool():
            pass
        case str():
            problem = "" if type(value) is str and is_unicode(value) else "it is no plain str of valid Unicode"
        case int():
            problem = "" if type(value) is int and _MIN_INT <= value <= _MAX_INT else "it is no plain int of 64 bits"
        case float():
            problem = "" if type(value) is float and math.isfinite(value) else "it is no plain finite float"
        case list() if type(value) is list:
            problem = _check_children(list(enumerate(value)), what, depth)
        case dict() if type(value) is dict:
            odd = next((key for key in value if type(key) is not str or not is_unicode(key)), None)
            problem = "its keys are not all str" if odd is not None else ""
            problem = problem or _check_children(list(value.items()), what, depth)
        case _:
            problem = f"{type_name(value)} is no JSON type; use dict, list, str, int, float, bool or None"
    if problem:
        raise InvalidInputError(f"cannot store {what}: {problem}")


def _check_children(items: list[tuple[Any, Any]], what: str, depth: int) -> str:
    if depth >= _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    for key, child in items:
        check_json(child, f"{what}[{key!r}]" if depth < 8 else what, depth + 1)
    return ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _no_float(text: str) -> float:
    raise ValueError(f"the number {text[:40]!r} is no integer")
