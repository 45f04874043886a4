"""Which keys a state tree may have: plain str of valid Unicode and plain 64-bit int, kept apart.

Pure, so that the format's codec asks the same questions as whoever builds a tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.tree import fqn, shorten

if TYPE_CHECKING:
    from vescale_ckpt.state.tree import Key, Path

MIN_INT_KEY: Final = -(2**63)
MAX_INT_KEY: Final = 2**63 - 1


def check_key(key: Any, path: Path = ()) -> Key:
    """Return the key of a dict, if a tree may have it.

    Raises:
        InvalidInputError: it may not; names the path of the dict and the way out.
    """
    problem = key_problem(key)
    if problem:
        # The repr of a stranger's object is not asked for: it may do anything.
        shown = shorten(key) if isinstance(key, str | int | float | None) else f"of type {type_name(key)}"
        raise InvalidInputError(f"cannot store the key {shown} of {place(path)}: {problem}", fqn=fqn(path))
    return key  # type: ignore[no-any-return]


def key_problem(key: Any) -> str:
    """Return why an object cannot be a key and what to do, or an empty string if it can."""
    if key.__class__ is str:
        return "" if is_unicode(key) else "it holds a lone surrogate, which is no text; decode the name properly"
    if key.__class__ is int:
        return "" if MIN_INT_KEY <= key <= MAX_INT_KEY else "int keys have 64 bits; use str() of it"
    if isinstance(key, str | int) and not isinstance(key, bool):
        return f"it is {type_name(key)} and would come back as its base; use a plain str or int"
    return f"keys are str or int, this is {type_name(key)}; use str() of it"


def is_unicode(text: str) -> bool:
    """Return whether a str is valid Unicode text, which UTF-8 can write: it has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def type_name(obj: Any) -> str:
    """Return the full name of an object's type."""
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def place(path: Path) -> str:
    """Return a path as a message says it."""
    return repr(fqn(path)) if path else "the top of the state"
