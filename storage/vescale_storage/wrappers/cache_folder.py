"""Ranges of objects as files in a folder that all processes of a host share, bounded in bytes, the least used go first.

Nothing here is trusted: a file says by its own digest whether it is what its name says, and one that is not is removed.
So no crash, no other process and no damage can do more than cost a read from the storage. Files appear by a rename;
nothing is synced. The bytes in use stand in one small file under a lock, and are counted anew at every eviction.

    v1/objects/<2 hex>/<62 hex>/<start>-<stop>[.end]     magic, digest, bytes [start, stop) of the object with this name
    v1/temp/                                             files that are being written
    v1/usage                                             bytes in use; its lock is the folder's
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from vescale_storage.digest import DIGEST_BYTES, digest_parts, hexdigest
from vescale_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 4 * 2**20
"""A file holds bytes of one block of this grid: what a part of it costs to read and verify is bounded."""

_MAGIC: Final = b"VSCACHE1"
_HEADER_BYTES: Final = len(_MAGIC) + DIGEST_BYTES
_PAGE_BYTES: Final = 4096
_EXTENT: Final = re.compile(r"(0|[1-9][0-9]*)-([1-9][0-9]*)(\.end)?")
_SMALLEST_LIMIT_BLOCKS: Final = 4
_KEPT_PARTS: Final = (7, 8)
"""An eviction leaves this much of the limit, so that the next one is not due at once."""
_LOCK_SECONDS: Final = 1.0
_LOCK_PAUSE_SECONDS: Final = 0.002
_TEMP_SECONDS: Final = 3600.0
_USAGE_DIGITS: Final = 20


class _Extent(NamedTuple):
    start: int
    stop: int
    is_end: bool
    """Whether the object ends here."""

    @property
    def file_name(self) -> str:
        return f"{self.start}-{self.stop}{'.end' if self.is_end else ''}"


class CacheFolder:
    """A bounded set of ranges of named objects; every method blocks, and none raises for what the disk does.

    Args:
        folder: where; made when it is first needed.
        limit_bytes: how much it may hold. Only what other processes are writing during a recount may exceed it.
        block_bytes: see ``BLOCK_BYTES``.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int, *, block_bytes: int = BLOCK_BYTES) -> None:
        if not 0 < block_bytes <= BLOCK_BYTES or limit_bytes < _SMALLEST_LIMIT_BLOCKS * block_bytes:
            raise ConfigError(
                f"cannot keep a cache of {limit_bytes} bytes in {folder}: at least "
                f"{_SMALLEST_LIMIT_BLOCKS * BLOCK_BYTES} are needed"
            )
        self.folder = Path(folder).expanduser().absolute()
        self.limit_bytes = limit_bytes
        self.num_damaged = 0
        """Files that were found to be wrong and removed."""
        root = self.folder / "v1"
        self._objects = root / "objects"
        self._temps = root / "temp"
        self._usage = root / "usage"
        self._block_bytes = block_bytes
        self._writes = True
        self._warned: set[str] = set()

    def read(self, name: str, start: int, out: memoryview) -> tuple[int, int] | None:
        """Fill ``out`` with the object's bytes from ``start`` on, as far as they are here.

        Returns:
            The smallest range that holds all that is missing, or None if nothing is.
        """
        folder = self._folder(name)
        held = self._held(folder)
        stop = start + len(out)
        missing: list[int] = []
        at = start
        while at < stop:
            covering = [extent for extent in held if extent.start <= at < extent.stop]
            if not covering:
                upto = min([stop, *(extent.start for extent in held if extent.start > at)])
                missing += [at, upto]
                at = upto
                continue
            best = max(covering, key=lambda extent: extent.stop)
            upto = min(best.stop, stop)
            if self._fill(folder, name, best, at, out[at - start : upto - start]):
                at = upto
            else:
                held.remove(best)
        return (min(missing), max(missing)) if missing else None

    def read_whole(self, name: str) -> bytes | None:
        """Return the whole object, or None if any of it is missing, or where it ends is not known."""
        held = self._held(self._folder(name))
        size_bytes = max((extent.stop for extent in held if extent.is_end), default=None)
        # Names alone may lie: nothing is allocated for more than the files can hold.
        if size_bytes is None or size_bytes > sum(extent.stop - extent.start for extent in held):
            return None
        out = bytearray(size_bytes)
        return bytes(out) if self.read(name, 0, memoryview(out)) is None else None

    def write(self, name: str, start: int, data: memoryview, *, is_end: bool = False) -> None:
        """Keep a range, as far as there is room, the disk allows it, and it is not here yet."""
        if not self._writes:
            return
        folder = self._folder(name)
        try:
            held = self._held(folder)
            new = [
                extent for extent in self._cut(start, start + len(data), is_end=is_end) if not _is_held(extent, held)
            ]
            if new and self._reserve(sum(map(_disk_bytes, new))):
                for extent in new:
                    self._put(folder, name, extent, data[extent.start - start : extent.stop - start])
        except OSError as error:
            self._writes = False
            self._warn("cannot write", error)

    def forget(self, name: str) -> None:
        """Remove all that is held of an object."""
        folder = self._folder(name)
        for extent in self._held(folder):
            self._remove(folder / extent.file_name, _disk_bytes(extent))

    def used_bytes(self) -> int:
        """Return what is held, counted anew."""
        return sum(size for _, size, _ in self._all_files())

    # One object

    def _folder(self, name: str) -> Path:
        hashed = hexdigest(name.encode())
        return self._objects / hashed[:2] / hashed[2:]

    def _held(self, folder: Path) -> list[_Extent]:
        try:
            names = os.listdir(folder)  # noqa: PTH208 - names alone, no paths
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn("cannot read", error)
            return []
        matches = [match for match in map(_EXTENT.fullmatch, names) if match is not None]
        extents = [_Extent(int(match[1]), int(match[2]), match[3] is not None) for match in matches]
        return [extent for extent in extents if 0 < extent.stop - extent.start <= BLOCK_BYTES]

    def _cut(self, start: int, stop: int, *, is_end: bool) -> Iterator[_Extent]:
        grid = range(start - start % self._block_bytes + self._block_bytes, stop, self._block_bytes)
        for low, high in itertools.pairwise([start, *grid, stop]):
            if low < high:
                yield _Extent(low, high, is_end and high == stop)

    def _fill(self, folder: Path, name: str, extent: _Extent, at: int, out: memoryview) -> bool:
        """Copy a part of an extent from its file; return False, and remove the file, if it is not what it should be."""
        path = folder / extent.file_name
        whole = at == extent.start and len(out) == extent.stop - extent.start
        data = out if whole else memoryview(bytearray(extent.stop - extent.start))
        header = bytearray(_HEADER_BYTES)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.preadv(descriptor, [header, data], 0)
                with contextlib.suppress(OSError):
                    os.utime(descriptor)  # a file that is used lives longer
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn("cannot read", error)
            return False
        if found != _HEADER_BYTES + len(data) or header != _header(name, extent, data):
            self.num_damaged += 1
            self._warn("held a damaged file, which is removed", path)
            self._remove(path, _disk_bytes(extent))
            return False
        if not whole:
            out[:] = data[at - extent.start : at - extent.start + len(out)]
        return True

    def _put(self, folder: Path, name: str, extent: _Extent, data: memoryview) -> None:
        temp = self._temps / uuid.uuid4().hex
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                views: Sequence[bytes | memoryview] = [_header(name, extent, data), data]
                written = os.writev(descriptor, views)
                while written < _HEADER_BYTES + len(data):
                    written += os.write(descriptor, data[written - _HEADER_BYTES :])
            finally:
                os.close(descriptor)
            self._publish(temp, folder, extent)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise

    @staticmethod
    def _publish(temp: Path, folder: Path, extent: _Extent) -> None:
        for _ in range(8):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                temp.rename(folder / extent.file_name)
            except FileNotFoundError:
                continue  # an eviction has just removed the empty folder
            return
        temp.unlink(missing_ok=True)

    def _remove(self, path: Path, num_bytes: int) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
            with self._locked() as usage:
                if usage is not None:
                    usage.write(max(0, usage.read() - num_bytes))

    # All objects

    def _reserve(self, num_bytes: int) -> bool:
        """Return whether there is room, made by an eviction if need be; it then counts as used."""
        self._temps.mkdir(parents=True, exist_ok=True)
        with self._locked() as usage:
            if usage is None:
                return False
            used = usage.read()
            if used < 0 or used + num_bytes > self.limit_bytes:
                kept, whole = _KEPT_PARTS
                used = self._evict(self.limit_bytes * kept // whole - num_bytes)
            usage.write(used + num_bytes)
        return True

    def _evict(self, target_bytes: int) -> int:
        """Remove the files used longest ago until so many bytes are left, or fewer; return how many are."""
        now = time.time()
        for temp in self._temps.iterdir():
            with contextlib.suppress(OSError):
                if now - temp.stat().st_mtime > _TEMP_SECONDS:
                    temp.unlink()
        files = sorted(self._all_files())
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used <= target_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            used -= size
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        return used

    def _all_files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time of last use, size on disk and path of every file."""
        for folder in self._objects.glob("*/*"):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        yield status.st_mtime_ns, _pages(status.st_size), folder / entry.name

    @contextlib.contextmanager
    def _locked(self) -> Iterator[_Usage | None]:
        """Hold the folder's lock; None if others hold it all the time, for nothing here is worth waiting long for."""
        descriptor = os.open(self._usage, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not _try_lock(descriptor):
                yield None
                return
            try:
                yield _Usage(descriptor)
            finally:
                # Not left to the close: a child forked meanwhile would hold it on.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _warn(self, problem: str, cause: object) -> None:
        """Say once of each kind of problem that it is there; loads go on without the cache."""
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("cache in %s %s (%s): loads go on and read the storage", self.folder, problem, cause)


class _Usage:
    """The count of bytes in use, in a file whose lock is held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int:
        """Return the count, or -1 if it has to be made anew."""
        found = os.pread(self._descriptor, _USAGE_DIGITS + 1, 0)
        return int(found) if len(found) == _USAGE_DIGITS and found.isdigit() else -1

    def write(self, num_bytes: int) -> None:
        """Set the count."""
        os.ftruncate(self._descriptor, _USAGE_DIGITS)
        os.pwrite(self._descriptor, b"%0*d" % (_USAGE_DIGITS, num_bytes), 0)


def _try_lock(descriptor: int) -> bool:
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_LOCK_PAUSE_SECONDS)
        else:
            return True


def _header(name: str, extent: _Extent, data: memoryview) -> bytes:
    return _MAGIC + digest_parts([f"{name}\n{extent.file_name}\n".encode(), data])


def _is_held(extent: _Extent, held: Sequence[_Extent]) -> bool:
    return any(
        other.start <= extent.start and extent.stop <= other.stop and (other.is_end or not extent.is_end)
        for other in held
    )


def _disk_bytes(extent: _Extent) -> int:
    return _pages(_HEADER_BYTES + extent.stop - extent.start)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
