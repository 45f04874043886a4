"""Zip archives whose size and offsets are known before a byte is written, as torch and numpy read them.

Members are stored as they are, each begins at a multiple of 64 bytes, and checksums follow the bytes.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_ckpt.interop.convert.files import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vescale_storage.backend import Buffer

_ALIGN: Final = 64
_BIG: Final = 0xFFFFFFFF
_FLAGS: Final = 0x0808  # checksum and sizes come behind the bytes; names are UTF-8
_DOS_DATE: Final = 0x21  # 1 January 1980: equal content gives equal bytes
_PAD_ID: Final = 0x4246


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One member of an archive."""

    name: str
    num_bytes: int
    parts: Callable[[], Iterator[Callable[[], Buffer]]] = field(repr=False)

    @classmethod
    def of(cls, name: str, data: bytes) -> ZipMember:
        """Return a member whose bytes are there."""
        return cls(name, len(data), lambda: iter([lambda: data]))


class ZipLayout:
    """An archive of some members, in this order."""

    def __init__(self, members: Sequence[ZipMember]) -> None:
        self._members = members
        self._offsets: list[int] = []
        at = 0
        for member in members:
            self._offsets.append(at)
            at += len(_local(member, at)) + member.num_bytes + _descriptor_bytes(member)
        self._directory_at = at
        self.num_bytes = at + len(self._end([0] * len(members)))

    def parts(self) -> Iterator[Part]:
        """Yield the parts of the archive."""
        checksums: list[int] = []
        for member, offset in zip(self._members, self._offsets, strict=True):
            yield Part(lambda member=member, offset=offset: _local(member, offset))  # type: ignore[misc]
            checksums.append(0)

            def seen(data: Buffer) -> None:
                checksums[-1] = zlib.crc32(data, checksums[-1])

            for make in member.parts():
                yield Part(make, seen)
            yield Part(lambda member=member: _descriptor(member, checksums[-1]))  # type: ignore[misc]
        yield Part(lambda: self._end(checksums))

    def _end(self, checksums: Sequence[int]) -> bytes:
        """Return the directory and what ends the archive."""
        rows = [
            _row(member, offset, checksum)
            for member, offset, checksum in zip(self._members, self._offsets, checksums, strict=True)
        ]
        directory = b"".join(rows)
        count, size, at = len(rows), len(directory), self._directory_at
        long = b""
        if count >= 0xFFFF or at + size >= _BIG:
            long = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
            long += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
            count, size, at = min(count, 0xFFFF), min(size, _BIG), _BIG
        return directory + long + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, at, 0)


def _is_big(member: ZipMember) -> bool:
    return member.num_bytes >= _BIG


def _local(member: ZipMember, offset: int) -> bytes:
    name = member.name.encode()
    long = struct.pack("<HHQQ", 1, 16, member.num_bytes, member.num_bytes) if _is_big(member) else b""
    pad = -(offset + 30 + len(name) + len(long) + 4) % _ALIGN
    extra = long + struct.pack("<HH", _PAD_ID, pad) + bytes(pad)
    size = _BIG if long else 0
    version = 45 if long else 20
    fields = (b"PK\x03\x04", version, _FLAGS, 0, 0, _DOS_DATE, 0, size, size, len(name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + name + extra


def _descriptor_bytes(member: ZipMember) -> int:
    return 24 if _is_big(member) else 16


def _descriptor(member: ZipMember, checksum: int) -> bytes:
    layout = "<4sIQQ" if _is_big(member) else "<4sIII"
    return struct.pack(layout, b"PK\x07\x08", checksum, member.num_bytes, member.num_bytes)


def _row(member: ZipMember, offset: int, checksum: int) -> bytes:
    name = member.name.encode()
    long = []
    size, at = member.num_bytes, offset
    if size >= _BIG:
        long += [size, size]
        size = _BIG
    if at >= _BIG:
        long.append(at)
        at = _BIG
    extra = struct.pack(f"<HH{len(long)}Q", 1, 8 * len(long), *long) if long else b""
    version = 45 if long else 20
    fields = (b"PK\x01\x02", version, version, _FLAGS, 0, 0, _DOS_DATE, checksum, size, size)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *fields, len(name), len(extra), 0, 0, 0, 0, at) + name + extra
