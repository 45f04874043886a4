"""A target on this machine: files grow in the scratch folder, part by part, with a log of the parts' digests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import IO, TYPE_CHECKING, Final

from blake3 import blake3

from vescale_ckpt.errors import InternalError, NoSpaceError
from vescale_ckpt.interop.convert.target import Done, Target
from vescale_ckpt.interop.safetensors.local import file_errors
from vescale_storage.backends.posix import sync_file, sync_folder
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vescale_ckpt.interop.convert.files import TargetFile
    from vescale_storage.backend import Buffer

_LOG_EVERY_BYTES: Final = 4 << 20


class LocalTarget(Target):
    """A folder of this machine, or one file in it."""

    def __init__(self, path: Path, *, is_file: bool) -> None:
        super().__init__(str(path), path.name if is_file else "")
        self._folder = path.parent if is_file else path

    def get(self, name: str) -> bytes | None:
        """Return a small file; None where it is not."""
        with file_errors("read", self._folder / name):
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

    def put(self, name: str, data: bytes) -> None:
        """Write beside, then rename."""
        path = self._folder / name
        temp = self._folder / self.scratch / f"{path.name}.new"
        with file_errors("write", path):
            temp.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with temp.open("wb") as out:
                out.write(data)
                out.flush()
                sync_file(out.fileno())
            temp.replace(path)

    def present(self) -> list[str]:
        """Return what is there, without scratch."""
        with file_errors("look into", self._folder):
            if self._file_name:
                there = (self._folder / self._file_name).exists() or (self._folder / self._file_name).is_symlink()
                return [self._file_name] if there else []
            if not self._folder.exists():
                return []
            return sorted(entry.name for entry in self._folder.iterdir() if entry.name != self.scratch)

    def write(
        self,
        number: int,
        file: TargetFile,
        overflows: Callable[[], dict[str, int]],
        advance: Callable[[int], None],
    ) -> Done:
        """Write a file to the end, going on where an earlier attempt ended."""
        found = self._finished(number)
        if found is not None:
            advance(found.num_bytes)
            return found
        path = self._folder / self.scratch / f"{number}.part"
        with file_errors("write", path):
            self._refuse_full(path, file.num_bytes)
            growing = _Growing(path, file.num_bytes)
            with growing:
                for part in file.parts():
                    known = growing.known()
                    data = part.make() if known is None else known
                    if known is None:
                        growing.append(data, overflows())
                    part.seen(data)
                    advance(len(data))
                done = growing.finish(file.name)
        self.record(number, done)
        return done

    def _finished(self, number: int) -> Done | None:
        """Return what is recorded of a file, if its bytes still are what was recorded."""
        done = self.done(number)
        if done is None:
            return None
        for path in (self._folder / self.scratch / f"{number}.part", self._folder / done.name):
            if path.is_file() and path.stat().st_size == done.num_bytes and _digest_of(path) == done.digest:
                done.resumed_bytes = done.num_bytes
                return done
        return None

    def _refuse_full(self, path: Path, num_bytes: int) -> None:
        usage = shutil.disk_usage(path.parent)
        there = path.stat().st_size if path.exists() else 0
        if usage.total and usage.free + there < num_bytes:  # some network file systems do not say
            raise NoSpaceError(
                f"cannot write {num_bytes} bytes to {self.url}: its disk has {usage.free} free; free space or choose "
                "another disk",
                path=self.url,
            )

    def publish(self, number: int, name: str) -> None:
        """Rename a finished file; again changes nothing."""
        source, path = self._folder / self.scratch / f"{number}.part", self._folder / name
        with file_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # it has its name from an attempt that was interrupted here
                source.rename(path)
            sync_folder(path.parent)

    def clean(self) -> None:
        """Remove the scratch folder, and the target folder if that leaves it empty."""
        with file_errors("clean", self._folder):
            shutil.rmtree(self._folder / self.scratch, ignore_errors=True)
            if self._folder.exists():
                sync_folder(self._folder)
                if not self._file_name:
                    with contextlib.suppress(OSError):
                        self._folder.rmdir()


class _Growing:
    """A file that grows part by part, beside a log with length and digest of every part."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path, self._num_bytes = path, num_bytes
        self._log_path = path.with_suffix(".log")
        self._rows = _read_log(self._log_path)
        self._at = 0
        self._count = 0
        self._is_new = False
        """Parts are being made, no more read back."""
        self._hasher = blake3()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._resumed = 0
        self._overflowed: dict[str, int] = {}
        self._out: IO[bytes]
        self._log: IO[bytes]

    def __enter__(self) -> None:
        self._out = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "r+b")
        self._log = self._log_path.open("ab")

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._out.close()
        self._log.close()

    def known(self) -> bytes | None:
        """Return the next part if it is on disk as the log says; from the first that is not on, always None."""
        if self._is_new or self._count == len(self._rows):
            return None
        length, wanted, overflowed = self._rows[self._count]
        self._out.seek(self._at)
        data = self._out.read(length)
        if len(data) != length or digest(data).hex() != wanted:
            del self._rows[self._count :]
            return None
        self._take(data, overflowed)
        self._resumed += length
        return data

    def append(self, data: Buffer, overflowed: dict[str, int]) -> None:
        """Write the next part."""
        if not self._is_new:  # the first that is: what lies behind it is worth nothing
            self._is_new = True
            self._out.seek(self._at)
            self._out.truncate()
            self._log.truncate(0)
            self._pending = [_row(*row) for row in self._rows[: self._count]]
        self._out.write(data)
        self._pending.append(_row(len(data), digest(data).hex(), overflowed))
        self._pending_bytes += len(data)
        self._take(data, overflowed)
        if self._pending_bytes >= _LOG_EVERY_BYTES:
            self._flush()

    def _take(self, data: Buffer, overflowed: dict[str, int]) -> None:
        self._hasher.update(data)
        self._at += len(data)
        self._count += 1
        for name, number in overflowed.items():
            self._overflowed[name] = self._overflowed.get(name, 0) + number

    def _flush(self) -> None:
        """Put the bytes to disk before the log that speaks of them."""
        self._out.flush()
        self._log.writelines(self._pending)
        self._log.flush()
        self._pending.clear()
        self._pending_bytes = 0

    def finish(self, name: str) -> Done:
        """Make the file durable."""
        self._flush()
        self._out.truncate(self._at)
        sync_file(self._out.fileno())
        if self._at != self._num_bytes:
            raise InternalError(f"wrote {self._at} bytes of {name!r}, planned {self._num_bytes}; please report it")
        return Done(name, self._at, self._hasher.hexdigest(), self._overflowed, self._resumed)


def _row(length: int, wanted: str, overflowed: dict[str, int]) -> bytes:
    return json.dumps([length, wanted, overflowed]).encode() + b"\n"


def _read_log(path: Path) -> list[tuple[int, str, dict[str, int]]]:
    """Return the rows of a log up to the first that is torn."""
    rows: list[tuple[int, str, dict[str, int]]] = []
    if not path.exists():
        return rows
    with path.open("rb") as file:
        for line in file:
            try:
                length, wanted, overflowed = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            rows.append((length, wanted, overflowed))
    return rows


def _digest_of(path: Path) -> str:
    hasher = blake3()
    with path.open("rb", buffering=0) as file:
        while block := file.read(4 << 20):
            hasher.update(block)
    return hasher.hexdigest()
