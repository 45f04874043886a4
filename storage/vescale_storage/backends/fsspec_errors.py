"""What fsspec's file systems raise, in the words of this package.

Each of them brings its own client library, and many put the server's answer into the text of a plain OSError, so the
text is read as well.
"""

from __future__ import annotations

import asyncio
import errno
import re
from typing import Final

from vescale_storage.errors import (
    AccessDeniedError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
    VeScaleError,
)

_DENIED: Final = re.compile(
    r"\b(401|403)\b|access ?denied|forbidden|unauthori[sz]ed|expired ?token|credential", re.IGNORECASE
)
_THROTTLED: Final = re.compile(r"\b(429|503)\b|slow ?down|throttl|too many requests|rate.?limit", re.IGNORECASE)
_PASSING: Final = re.compile(r"\b(500|502|504)\b|internal ?error|bad gateway|connection|temporar", re.IGNORECASE)
_TAKEN: Final = re.compile(r"\b412\b|pre-?condition ?failed|already ?exists", re.IGNORECASE)
_PAST_END: Final = re.compile(r"\b416\b|invalid ?range|range not satisfiable", re.IGNORECASE)
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED_CODES: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_PASSING_CODES: Final = frozenset({
    None, errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.EHOSTUNREACH, errno.EINTR, errno.ENETUNREACH, errno.EPIPE, errno.ESTALE,
})  # fmt: skip


def is_taken(error: Exception) -> bool:
    """Return whether a create-only put was refused because an object is there."""
    return isinstance(error, FileExistsError) or _TAKEN.search(_said(error)) is not None


def is_past_end(error: Exception) -> bool:
    """Return whether a range was refused because it begins behind the object's last byte."""
    return _PAST_END.search(_said(error)) is not None


def translate(error: Exception, action: str, key: str, *, url: str) -> VeScaleError:
    """Return the package's error for what a file system raised at ``action`` on ``key``."""
    asked = f"cannot {action} {key!r} in {url}"
    message = f"{asked}: {str(error) or type(error).__name__}"
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) and action != "put":
        return ObjectNotFoundError(f"{asked}: there is no such object", key=key)
    return _storage_error(error, message, key)


def _storage_error(error: Exception, message: str, key: str) -> StorageError:
    # Only what the library says: keys may hold any number.
    said = _said(error).replace(key, "")
    code = error.errno if isinstance(error, OSError) else None
    found: StorageError
    if isinstance(error, TimeoutError | asyncio.TimeoutError) or code == errno.ETIMEDOUT:
        found = StorageTimeoutError(message, retryable=True, key=key)
    elif isinstance(error, PermissionError) or code in _DENIED_CODES or _DENIED.search(said):
        hint = "check that the credentials are valid, not expired, and allowed to do this"
        found = AccessDeniedError(f"{message}; {hint}", key=key)
    elif code in _NO_SPACE:
        found = NoSpaceError(f"{message}; free space, or raise the quota, and save again", key=key)
    elif _THROTTLED.search(said):
        found = ThrottledError(message, retryable=True, key=key)
    else:
        passing = bool(_PASSING.search(said)) or (isinstance(error, OSError) and code in _PASSING_CODES)
        found = StorageError(message, retryable=passing, key=key)
    return found


def _said(error: BaseException | None) -> str:
    """Return what the error says, and what the errors behind it say: file systems wrap those of client libraries."""
    said = []
    while error is not None:
        said += [_status(error), str(error)]
        error = error.__cause__
    return " ".join(said)


def _status(error: BaseException) -> str:
    """Return the HTTP status that many client libraries keep on their errors."""
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int):
            return str(found)
    return ""
