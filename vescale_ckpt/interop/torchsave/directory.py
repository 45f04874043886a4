"""Zip directories: where an archive's members lie, each checked, nothing unpacked.

torch and numpy store members as they are, so a member is a range of the file. What makes zips dangerous (members that
overlap, that are packed, that come twice, that lie about their size) is refused here.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from vescale_ckpt.interop.foreign.files import Files

_MAX_MEMBERS: Final = 2_000_000
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_LOCAL_MAGIC: Final = b"PK\x03\x04"
_MAX_DIRECTORY_READ: Final = 256 << 20
_MAX_RATIO: Final = 1040
"""Deflate never does better than 1032 to 1."""
_DAMAGES: Final = (
    zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, OverflowError, EOFError, KeyError, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an archive."""

    name: str
    offset: int
    """Of its bytes in the file."""
    stored_bytes: int
    num_bytes: int
    """Unpacked."""
    crc: int
    is_deflated: bool


class _Window(io.RawIOBase):
    """A range of a file, as zipfile wants it; refuses to be read at large."""

    def __init__(self, files: Files, name: str, start: int, length: int) -> None:
        self._files, self._name, self._start, self._length = files, name, start, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ValueError("before the beginning")
        return self._at

    def read(self, size: int = -1) -> bytes:
        count = max(0, self._length - self._at)
        count = count if size < 0 else min(count, size)
        if count > _MAX_DIRECTORY_READ:
            raise zipfile.BadZipFile(f"a directory of {count} bytes")
        data = self._files.read(self._name, self._start + self._at, count)
        self._at += count
        return data


def read_directory(
    files: Files, name: str, start: int = 0, length: int | None = None, *, allow_deflate: bool = False
) -> dict[str, Member]:
    """Return the members of an archive that is a file or a range of one.

    Raises:
        FormatError: it is no such archive, or holds packed members.
        CorruptionError: its members do not lie in it one after another.
        ObjectNotFoundError, StorageError: it cannot be read.
    """
    length = files.size(name) - start if length is None else length
    what = f"{name!r} of {files.url}"
    try:
        # Members' comments and extra fields are bounded by the directory, which is bounded by what may be read.
        with zipfile.ZipFile(_Window(files, name, start, length)) as archive:
            infos = archive.infolist()
    except _DAMAGES as error:
        raise FormatError(f"cannot read {what}: it is no whole zip archive: {error!r:.200}", path=name) from error
    if len(infos) > _MAX_MEMBERS:
        raise FormatError(f"cannot read {what}: it has {len(infos)} members, at most {_MAX_MEMBERS} are read")
    members: dict[str, Member] = {}
    end = start
    for info in sorted(infos, key=lambda info: info.header_offset):
        member = _member(files, name, start, info, what, allow_deflate=allow_deflate)
        if info.filename in members:
            raise CorruptionError(f"cannot read {what}: its member {info.filename[:80]!r} comes twice", path=name)
        if start + info.header_offset < end or member.offset + member.stored_bytes > start + length:
            raise CorruptionError(
                f"cannot read {what}: its member {info.filename[:80]!r} overlaps another or leaves the file", path=name
            )
        end = member.offset + member.stored_bytes
        members[info.filename] = member
    return members


def _member(files: Files, name: str, start: int, info: zipfile.ZipInfo, what: str, *, allow_deflate: bool) -> Member:
    is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
    lies = (
        info.file_size > _MAX_RATIO * (info.compress_size + 1) if is_deflated else info.file_size != info.compress_size
    )
    if info.flag_bits & 1 or (is_deflated and not allow_deflate) or info.compress_type not in {0, 8} or lies:
        raise FormatError(
            f"cannot read {what}: its member {info.filename[:80]!r} is packed or encrypted ({info.compress_size} bytes "
            f"for {info.file_size}), which this format does not do",
            path=name,
        )
    header = files.read(name, start + info.header_offset, _LOCAL_HEADER.size)
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    if magic != _LOCAL_MAGIC:
        raise CorruptionError(
            f"cannot read {what}: its member {info.filename[:80]!r} is not where the directory says", path=name
        )
    offset = start + info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    return Member(info.filename, offset, info.compress_size, info.file_size, info.CRC, is_deflated)


def read_member(files: Files, name: str, member: Member, limit: int) -> bytes:
    """Return a small member that is not packed, its checksum proved.

    Raises:
        FormatError: it is larger than ``limit``.
        CorruptionError: its checksum does not hold.
    """
    if member.is_deflated or member.num_bytes > limit:
        raise FormatError(f"cannot read {member.name!r} of {name!r} in {files.url}: it has {member.num_bytes} bytes")
    data = files.read(name, member.offset, member.num_bytes)
    if zlib.crc32(data) != member.crc:
        raise CorruptionError(f"cannot read {member.name!r} of {name!r} in {files.url}: its checksum does not hold")
    return data
