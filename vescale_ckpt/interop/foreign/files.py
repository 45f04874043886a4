"""The files of a foreign checkpoint: read-only, by names relative to one folder that nothing can lead out of.

A name that a checkpoint gives is a stranger's: it is checked before anything is opened.
"""

from __future__ import annotations

import abc
from typing import Final

from vescale_ckpt.errors import CorruptionError, FormatError, NotFoundError
from vescale_storage.digest import digest

MAX_FILES: Final = 2_000_000
MAX_SMALL_BYTES: Final = 256 << 20
"""No index, header or table of a checkpoint is larger."""
SCRATCH_PREFIX: Final = ".vescale-convert"
"""What a conversion under way leaves beside its files; no part of a checkpoint."""
_SAMPLE_BYTES: Final = 64 << 10


def check_name(name: object, where: str) -> str:
    """Return a file name that stays inside its folder.

    Raises:
        FormatError: it is absolute, has an empty, ``.`` or ``..`` part, a backslash, a drive or control characters.
    """
    if (
        not isinstance(name, str)
        or not name
        or len(name) > 1024
        or any(part in {"", ".", ".."} for part in name.split("/"))
        or any(ord(char) < ord(" ") or char in "\\\x7f" for char in name)
    ):
        raise FormatError(
            f"cannot read {where}: it refers to the file {str(name)[:200]!r}, which is no plain name inside the folder",
            path=where,
        )
    return name


class Files(abc.ABC):
    """A folder. Safe for threads."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._listed: dict[str, int] | None = None

    @abc.abstractmethod
    def _list(self) -> dict[str, int]: ...

    @abc.abstractmethod
    def _read_into(self, name: str, offset: int, out: memoryview) -> None: ...

    @abc.abstractmethod
    def _modified(self, name: str) -> float: ...

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file.

        Raises:
            FormatError: the name leads out of the folder.
            ObjectNotFoundError: there is no such file.
        """

    def close(self) -> None:
        """Close what is open."""

    def names(self) -> dict[str, int]:
        """Return name -> bytes of every file below the folder, sorted; listed once."""
        if self._listed is None:
            self._listed = dict(sorted(self._list().items()))
        return self._listed

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        try:
            self.size(name)
        except NotFoundError:
            return False
        return True

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from a file.

        Raises:
            FormatError: the name leads out of the folder.
            ObjectNotFoundError: there is no such file.
            CorruptionError: it ends before.
            StorageError: it cannot be read.
        """
        check_name(name, self.url)
        if out:
            self._read_into(name, offset, out)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return a range of a file; at most ``MAX_SMALL_BYTES``.

        Raises:
            FormatError, ObjectNotFoundError, CorruptionError, StorageError: as for ``read_into``.
        """
        if not 0 <= length <= MAX_SMALL_BYTES or offset < 0:
            raise CorruptionError(
                f"cannot read {name!r} of {self.url}: {length} bytes from {offset} on are no header or table of a "
                f"checkpoint, which have at most {MAX_SMALL_BYTES}",
                path=name,
            )
        size = self.size(name)
        if offset + length > size:
            raise CorruptionError(
                f"cannot read bytes {offset}..{offset + length} of {name!r} in {self.url}: it has {size}; it was cut, "
                "or what refers to it is damaged",
                path=name,
            )
        out = bytearray(length)
        self.read_into(name, offset, memoryview(out))
        return bytes(out)

    def read_all(self, name: str, limit: int = MAX_SMALL_BYTES) -> bytes:
        """Return a small file whole.

        Raises:
            FormatError: it is larger than ``limit``, or the name leads out of the folder.
            ObjectNotFoundError, CorruptionError, StorageError: as for ``read_into``.
        """
        size = self.size(name)
        if size > limit:
            raise FormatError(f"cannot read {name!r} of {self.url}: it has {size} bytes, at most {limit} are expected")
        return self.read(name, 0, size)

    def fingerprint(self, name: str) -> bytes:
        """Return 32 bytes that depend on name, size, time and samples of the content."""
        size = self.size(name)
        step = max(1, (size - _SAMPLE_BYTES) // 3)
        starts = sorted({min(i * step, max(0, size - _SAMPLE_BYTES)) for i in range(4)})
        samples = [self.read(name, start, min(_SAMPLE_BYTES, size - start)) for start in starts]
        return digest(
            b"\0".join([name.encode(errors="surrogatepass"), f"{size} {self._modified(name)}".encode(), *samples])
        )
