"""Members that are packed (``numpy.savez_compressed``), read as if they were not: forward, and never at large."""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import CorruptionError

if TYPE_CHECKING:
    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.torchsave.directory import Member

_BLOCK_BYTES: Final = 1 << 20


class Inflated:
    """The unpacked bytes of one member. Reading on is cheap; reading back begins at the member's start again."""

    def __init__(self, files: Files, file: str, member: Member) -> None:
        self._files, self._file, self._member = files, file, member
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._unpack = zlib.decompressobj(-zlib.MAX_WBITS)
        self._at = 0
        self._packed_at = 0
        self._crc = 0

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with unpacked bytes from ``offset`` on.

        Raises:
            CorruptionError: there are fewer, or they are damaged.
        """
        del name
        with self._lock:
            if offset < self._at:
                self._restart()
            while self._at < offset:
                self._next(min(_BLOCK_BYTES, offset - self._at))
            filled = 0
            while filled < len(out):
                data = self._next(min(_BLOCK_BYTES, len(out) - filled))
                out[filled : filled + len(data)] = data
                filled += len(data)

    def _next(self, limit: int) -> bytes:
        """Return at least one and at most ``limit`` bytes."""
        while True:
            packed = self._unpack.unconsumed_tail
            if not packed:
                count = min(_BLOCK_BYTES, self._member.stored_bytes - self._packed_at)
                packed = self._files.read(self._file, self._member.offset + self._packed_at, count)
                self._packed_at += count
            try:
                data = self._unpack.decompress(packed, limit)
            except zlib.error as error:
                raise self._damaged(str(error)) from error
            if data:
                break
            if self._unpack.eof or not packed:
                raise self._damaged("it ends before its size is reached")
        self._at += len(data)
        self._crc = zlib.crc32(data, self._crc)
        if self._at == self._member.num_bytes and self._crc != self._member.crc:
            raise self._damaged("its checksum does not hold")
        return data

    def _damaged(self, why: str) -> CorruptionError:
        return CorruptionError(f"cannot unpack {self._member.name!r} of {self._file!r} in {self._files.url}: {why}")
