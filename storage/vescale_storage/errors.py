"""The error tree of storage: classed by what a handler will do, each with a stable ``kind``.

It stands on the ground floor: every package imports it and it imports nothing. A message says what was
asked, what was found, where, and what to do. ``kind`` strings are append-only: programs may match them.
"""

from __future__ import annotations

from typing import Any, ClassVar


class VeScaleError(Exception):
    """Base of every error that these packages raise on purpose."""

    kind: ClassVar[str] = "error"

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, Any] = context
        """What it is about: any of fqn, box, key, rank, step, snapshot, phase."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross process borders whole: message, context and class."""
        return _rebuild, (type(self), self.message, self.context)


def _rebuild(cls: type[VeScaleError], message: str, context: dict[str, Any]) -> VeScaleError:
    return cls(message, **context)


class InvalidInputError(VeScaleError, ValueError):
    """The call itself is wrong and the caller can fix it."""

    kind = "invalid_input"


class ConfigError(InvalidInputError):
    """An impossible option or combination, refused before any I/O."""

    kind = "config"


class NotFoundError(VeScaleError, LookupError):
    """What was asked for is not there."""

    kind = "not_found"


class ObjectNotFoundError(NotFoundError, FileNotFoundError):
    """No object has this key."""

    kind = "object_not_found"


class RefNotFoundError(NotFoundError):
    """No ref has this name."""

    kind = "ref_not_found"


class StoreNotFoundError(NotFoundError):
    """There is no store at this place."""

    kind = "store_not_found"


class AlreadyExistsError(VeScaleError, FileExistsError):
    """A create-only put found an object under its key."""

    kind = "already_exists"


class ConflictError(VeScaleError):
    """Somebody else moved what this call wanted to move: look again and decide."""

    kind = "conflict"


class FormatError(VeScaleError):
    """Bytes cannot be understood."""

    kind = "format"


class UnsupportedVersionError(FormatError):
    """The bytes were written by a newer format; names the version found and those supported."""

    kind = "unsupported_version"


class CorruptionError(FormatError):
    """A digest, a length, a cover or a bound does not hold: the bytes are damaged."""

    kind = "corruption"


class StorageError(VeScaleError, OSError):
    """The environment failed; ``retryable`` says whether trying again can help."""

    kind = "storage"

    def __init__(self, message: str, *, retryable: bool = False, **context: Any) -> None:
        super().__init__(message, **context)
        self.retryable = retryable

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep ``retryable`` too."""
        return _rebuild_storage, (type(self), self.message, self.context, self.retryable)

    def __str__(self) -> str:
        """Return the message alone, never OSError's errno form."""
        return self.message


def _rebuild_storage(
    cls: type[StorageError],
    message: str,
    context: dict[str, Any],
    retryable: bool,
) -> StorageError:
    return cls(message, retryable=retryable, **context)


class AccessDeniedError(StorageError):
    """Credentials are missing, wrong or expired, or do not allow this."""

    kind = "access_denied"


class ThrottledError(StorageError):
    """The server asks to slow down; always retryable."""

    kind = "throttled"


class StorageTimeoutError(StorageError, TimeoutError):
    """A deadline ran out."""

    kind = "timeout"


class NoSpaceError(StorageError):
    """The disk or the quota is full."""

    kind = "no_space"


class RankFailureError(VeScaleError):
    """Another rank failed; the same error is raised on all ranks."""

    kind = "rank_failure"

    def __init__(self, message: str, *, failures: dict[int, str] | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.failures = failures or {}
        """Rank -> what it reported."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep ``failures`` too."""
        return _rebuild_rank_failure, (self.message, self.failures, self.context)


def _rebuild_rank_failure(message: str, failures: dict[int, str], context: dict[str, Any]) -> RankFailureError:
    return RankFailureError(message, failures=failures, **context)


class StateError(VeScaleError, RuntimeError):
    """Not now: closed, read-only, forked, or a save is in flight."""

    kind = "state"


class InternalError(VeScaleError, AssertionError):
    """A bug of ours; please report it."""

    kind = "internal"
