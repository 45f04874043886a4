"""The errors of the checkpoint package, beside those of storage that it passes on."""

from __future__ import annotations

from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    CorruptionError,
    FormatError,
    InternalError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    ObjectNotFoundError,
    RankFailureError,
    RefNotFoundError,
    StateError,
    StorageError,
    StorageTimeoutError,
    StoreNotFoundError,
    ThrottledError,
    UnsupportedVersionError,
    VeScaleError,
)

__all__ = [
    "AccessDeniedError",
    "AlreadyExistsError",
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "FormatError",
    "InternalError",
    "InvalidInputError",
    "LayoutError",
    "MismatchError",
    "NoSpaceError",
    "NotFoundError",
    "ObjectNotFoundError",
    "RankFailureError",
    "RefNotFoundError",
    "SnapshotNotFoundError",
    "StateError",
    "StorageError",
    "StorageTimeoutError",
    "StoreNotFoundError",
    "ThrottledError",
    "UnsupportedVersionError",
    "VeScaleError",
]


class LayoutError(InvalidInputError):
    """Mesh, placements and shape do not fit together."""

    kind = "layout"


class MismatchError(VeScaleError, ValueError):
    """Checkpoint and target, or two ranks, disagree; ``problems`` lists all of it, one line each."""

    kind = "mismatch"

    @property
    def problems(self) -> tuple[str, ...]:
        """Every disagreement found, one line each."""
        return tuple(self.context.get("problems", ()))


class SnapshotNotFoundError(NotFoundError):
    """No snapshot of this run and step is committed."""

    kind = "snapshot_not_found"
