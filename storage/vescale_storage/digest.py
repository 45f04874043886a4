"""The one hash of the store: BLAKE3-256 of bytes, whole or in parts.

Everything that is named or checked by its content goes through here, so that the choice of hash stands in one place.
Large inputs release the interpreter lock while they are hashed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable

DIGEST_BYTES: Final = 32
"""Size of a digest."""

HASH_NAME: Final = "blake3-256"
"""What ``store.json`` calls this hash."""


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32 bytes of the BLAKE3 digest of ``data``."""
    return blake3.blake3(data).digest()


def digest_parts(payload: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """Return the digest of the parts one after another, equal to that of their concatenation; copies nothing."""
    hasher = blake3.blake3()
    for part in payload:
        hasher.update(part)
    return hasher.digest()


def hexdigest(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of ``data`` as 64 lower-case hex digits."""
    return blake3.blake3(data).hexdigest()
