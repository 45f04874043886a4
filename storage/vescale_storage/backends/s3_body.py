"""The body of an upload: the caller's buffers, sent one after another without being joined."""

from __future__ import annotations

import base64
import io
import zlib
from typing import TYPE_CHECKING, Final

from vescale_storage.payload import payload_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_SEND_BYTES: Final = 512 * 2**10
"""What is handed to the socket at once: more would hold the event loop, less costs calls."""


class PayloadBody:
    """What botocore and aiohttp need of a body: a length, bytes to iterate, and a file's read for those who sign it.

    Every iteration starts at the first byte, so a request that is sent twice sends the same bytes twice.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._num_bytes = payload_bytes(views)
        self._position = 0

    def __len__(self) -> int:
        return self._num_bytes

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for view in self._views:
            for start in range(0, len(view), _SEND_BYTES):
                yield view[start : start + _SEND_BYTES]

    def tell(self) -> int:
        """Return the position of ``read``."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position of ``read``; iterations are not affected."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = min(max(0, base + offset), self._num_bytes)
        return self._position

    def read(self, num_bytes: int = -1) -> bytes:
        """Return a copy of the next bytes."""
        stop = self._num_bytes if num_bytes < 0 else self._position + num_bytes
        found = bytearray()
        offset = 0
        for view in self._views:
            found += view[max(0, self._position - offset) : max(0, stop - offset)]
            offset += len(view)
            if offset >= stop:
                break
        self._position += len(found)
        return bytes(found)


def crc32(views: Sequence[memoryview]) -> str:
    """Return the CRC-32 of the views as S3 writes it, for the server to check; blocking, so call it on a thread."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode("ascii")
