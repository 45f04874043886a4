"""Does this storage keep a create-only put's promise? Asked once, when a store is opened."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

from vescale_storage.errors import AlreadyExistsError

if TYPE_CHECKING:
    from vescale_storage.backend import Backend

PROBE_PREFIX = "probe/"


async def probe_conditional_put(backend: Backend) -> bool:
    """Return whether a second create of one key is refused and changes nothing.

    Old servers ignore the condition and answer as if all were well; then two writers can both believe that they made
    a ref. A back end that says itself that it has no conditional put is believed without asking.

    Raises:
        StorageError: the storage cannot be written to.
    """
    if not backend.capabilities.conditional_put:
        return False
    key = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        await backend.put_if_absent(key, [b"first"])
        with contextlib.suppress(AlreadyExistsError):
            await backend.put_if_absent(key, [b"second"])
            return False
        return await backend.get(key) == b"first"
    finally:
        await backend.delete(key)
