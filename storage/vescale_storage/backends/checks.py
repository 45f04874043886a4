"""What every back end checks of its arguments before it touches the storage.

The same call is refused with the same error everywhere, so that a key that works in memory works on S3.
"""

from __future__ import annotations

from vescale_storage.errors import CorruptionError, InvalidInputError

MAX_KEY_BYTES = 1024
"""S3's limit on a whole key; other stores allow at least as much."""

_DELETE = 0x7F


def check_key(key: str, *, url: str) -> None:
    """Refuse a key that is no plain ``/``-separated relative name.

    Raises:
        InvalidInputError: empty, too long, absolute, with an empty, ``.`` or ``..`` component, or with control
            characters: such a key could leave the root or mean another object elsewhere.
    """
    problem = _key_problem(key)
    if problem is not None:
        raise InvalidInputError(
            f"cannot use key {key!r} in {url}: {problem}; keys are relative names such as 'packs/ab/cdef'", key=key
        )


def check_prefix(prefix: str, *, url: str) -> None:
    """Refuse a listing prefix under which no valid key can lie.

    Raises:
        InvalidInputError: the prefix is absolute, or has an empty, ``.`` or ``..`` component before its last ``/``.
    """
    folders = prefix.split("/")[:-1]
    if any(part in {"", ".", ".."} for part in folders) or _has_control(prefix):
        raise InvalidInputError(
            f"cannot list prefix {prefix!r} in {url}: it is absolute, has an empty, '.' or '..' component "
            "or control characters; pass the beginning of a key",
            key=prefix,
        )


def check_range(key: str, offset: int, *, url: str) -> None:
    """Refuse a negative offset.

    Raises:
        InvalidInputError: ``offset`` is negative.
    """
    if offset < 0:
        raise InvalidInputError(f"cannot read {key!r} in {url} from offset {offset}: it must be >= 0", key=key)


def past_end(key: str, offset: int, length: int, size_bytes: int, *, url: str) -> CorruptionError:
    """Return the error for a range that leaves the object."""
    return CorruptionError(
        f"cannot read bytes {offset}..{offset + length} of {key!r} in {url}: the object has only {size_bytes} bytes; "
        "it was cut, or what refers to it is damaged",
        key=key,
    )


def _key_problem(key: str) -> str | None:
    parts = key.split("/")
    problem = None
    if not key or "" in parts:
        problem = "it is empty or has an empty component"
    elif "." in parts or ".." in parts:
        problem = "it has a '.' or '..' component"
    elif _has_control(key):
        problem = "it has control characters"
    elif len(key.encode(errors="surrogatepass")) > MAX_KEY_BYTES:
        problem = f"it has more than {MAX_KEY_BYTES} bytes"
    elif any("\ud800" <= char <= "\udfff" for char in key):
        problem = "it is not valid Unicode"
    return problem


def _has_control(text: str) -> bool:
    return any(ord(char) < ord(" ") or ord(char) == _DELETE for char in text)
