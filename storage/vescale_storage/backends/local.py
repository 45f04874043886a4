"""Objects as files under a folder of a POSIX file system, put atomically and durably.

A put writes a temporary file beside the objects (same file system), syncs it, gives it its name in one step
(``link`` when the name must be free, ``rename`` otherwise) and syncs the folder. So a reader, or a crash at any
instruction, sees the old object, the new one or none, and at worst a temporary file stays, which ``leftovers`` finds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import urllib.parse
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vescale_storage.backend import Backend, Capabilities, Leftover, ObjectInfo, Payload
from vescale_storage.backends import posix
from vescale_storage.backends.checks import check_key, check_prefix, check_range, past_end
from vescale_storage.backends.threads import StuckError, Threads, stuck
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
    VeScaleError,
)
from vescale_storage.payload import cut, payload_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator, Sequence

TEMP_FOLDER: Final = ".tmp"
"""Under the root, so on the same file system as the objects; no key may begin with it."""

_CHUNK_BYTES: Final = 16 * 2**20
"""Bytes moved by one job of a thread: small objects get their turn between the chunks of large ones."""

_LIST_BATCH: Final = 1000
_MAX_NAME_BYTES: Final = 255
_MAX_FOLDER_RACES: Final = 16


class LocalBackend(Backend):
    """Files under ``root``, which the first put creates.

    Args:
        root: the folder.
        durable: sync files and folders; without it a put is still atomic, but the loss of power may lose it.
        num_threads: how many blocking calls may run at once.
    """

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True, num_threads: int = 16) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"cannot open {self.url} as a folder of objects: it is no folder")
        if num_threads < 1:
            raise ConfigError(f"cannot open {self.url} with num_threads={num_threads}: at least 1 is needed")
        self.capabilities = Capabilities(
            conditional_put=True,
            durable=durable,
            shared=True,
            max_object_bytes=2**63 - 1,
            put_concurrency=min(4, num_threads),
            get_concurrency=num_threads,
        )
        self._temp_root = self.root / TEMP_FOLDER
        self._threads = Threads(num_threads, name="vescale-local")
        # Folders whose own entry is known to be durable.
        self._settled: set[Path] = set()

    async def put(self, key: str, payload: Payload) -> None:
        """Write a temporary file and rename it over the object."""
        await self._put(key, payload, create=False)

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Write a temporary file and link it to the object's name, which fails if the name is taken."""
        await self._put(key, payload, create=True)

    async def get(self, key: str) -> bytes:
        """Return the whole file."""
        path = self._path(key)
        with self._translated("get", key):
            return await self._threads.run_abandonable(_read_file, path)

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Read straight into ``out``; nothing is copied on the way."""
        check_range(key, offset, url=self.url)
        with self._translated("get", key):
            await self._threads.drive(self._read_steps(key, offset, out))

    async def head(self, key: str) -> ObjectInfo:
        """Return size and time of the file."""
        path = self._path(key)
        with self._translated("head", key):
            status = await self._threads.run_abandonable(path.stat)
        if not posix.is_object(status):
            raise self._absent(key)
        return _info(key, status)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield the files under the prefix, reading only the folders that can hold some."""
        check_prefix(prefix, url=self.url)
        walk = self._walk(prefix)
        with self._translated("list", prefix):
            while batch := await self._threads.run_abandonable(_take, walk, _LIST_BATCH):
                for info in batch:
                    yield info

    async def delete(self, key: str) -> None:
        """Remove the file, and the folders that it leaves empty."""
        path = self._path(key)
        with contextlib.suppress(ObjectNotFoundError), self._translated("delete", key):
            await self._threads.run(self._remove, path)

    async def leftovers(self) -> Sequence[Leftover]:
        """Return the temporary files, also those of puts that are still under way: their time tells."""
        with self._translated("list", TEMP_FOLDER):
            return await self._threads.run_abandonable(self._find_temps)

    async def remove_leftover(self, leftover: Leftover) -> None:
        """Remove a temporary file."""
        if os.sep in leftover.name or leftover.name in {"", ".", ".."}:
            raise InvalidInputError(f"cannot remove leftover {leftover.name!r} in {self.url}: it is no temporary file")
        with contextlib.suppress(ObjectNotFoundError), self._translated("delete", leftover.name):
            await self._threads.run((self._temp_root / leftover.name).unlink)

    async def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    # Paths and errors

    def _path(self, key: str) -> Path:
        check_key(key, url=self.url)
        if key.split("/", 1)[0] == TEMP_FOLDER:
            raise InvalidInputError(
                f"cannot use key {key!r} in {self.url}: {TEMP_FOLDER}/ holds temporary files", key=key
            )
        return self.root / key

    @contextlib.contextmanager
    def _translated(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except VeScaleError:
            raise
        except StuckError as error:
            raise stuck(action, key, url=self.url) from error
        except OSError as error:
            raise posix.translate(error, action, key, url=self.url) from error

    def _absent(self, key: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(f"cannot find object {key!r} in {self.url}", key=key)

    # Put

    async def _put(self, key: str, payload: Payload, *, create: bool) -> None:
        path = self._path(key)
        with self._translated("put", key):
            await self._threads.drive(self._put_steps(key, path, payload, create=create))

    def _put_steps(self, key: str, path: Path, payload: Payload, *, create: bool) -> Generator[None]:
        if create and (path.exists() or path.is_symlink()):
            raise self._taken(key, path)
        descriptor, temp = self._open_temp(key)
        try:
            try:
                offset = 0
                for batch in cut(payload, _CHUNK_BYTES):
                    if offset:
                        yield
                    posix.write_all(descriptor, batch)
                    num_bytes = payload_bytes(batch)
                    if self.capabilities.durable:
                        posix.start_writeback(descriptor, offset, num_bytes)
                    offset += num_bytes
                if self.capabilities.durable:
                    posix.sync_file(descriptor)
            finally:
                os.close(descriptor)
            # A step of its own, so that no object appears whose buffers the caller gave up waiting for.
            yield
            self._publish(key, temp, path, create=create)
        finally:
            with contextlib.suppress(OSError):
                temp.unlink()

    def _open_temp(self, key: str) -> tuple[int, Path]:
        name = f"{uuid.uuid4().hex}~{urllib.parse.quote(key, safe='')}"
        if len(name) > _MAX_NAME_BYTES:
            name = name.split("~", 1)[0]
        temp = self._temp_root / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(temp, flags, 0o666), temp
        except FileNotFoundError:
            self._make_folder(self._temp_root)
            return os.open(temp, flags, 0o666), temp

    def _publish(self, key: str, temp: Path, path: Path, *, create: bool) -> None:
        folder = path.parent
        for attempt in itertools.count(1):
            try:
                self._make_folder(folder)
                if create:
                    self._link(key, temp, path)
                else:
                    temp.replace(path)
            except FileNotFoundError:
                # A delete elsewhere took away the folder that had just become empty.
                self._settled.discard(folder)
                if attempt == _MAX_FOLDER_RACES:
                    raise
            else:
                break
        if self.capabilities.durable:
            with contextlib.suppress(FileNotFoundError):  # deleted by somebody, and the folder with it
                posix.sync_folder(folder)

    def _link(self, key: str, temp: Path, path: Path) -> None:
        try:
            path.hardlink_to(temp)
        except FileExistsError as error:
            # NFS repeats a link whose answer was lost and then finds its own work: two names say that it was ours.
            if temp.stat().st_nlink == 1:
                raise self._taken(key, path) from error

    def _taken(self, key: str, path: Path) -> VeScaleError:
        if path.is_dir():
            return StorageError(f"cannot create {key!r} in {self.url}: a folder has this name", key=key)
        return AlreadyExistsError(f"cannot create {key!r} in {self.url}: an object is there", key=key)

    def _make_folder(self, folder: Path) -> None:
        """Make sure that the folder is there and that its entry is durable, and so for its parents up to the root."""
        if folder in self._settled and folder.is_dir():
            return
        if folder == self.root:
            folder.parent.mkdir(parents=True, exist_ok=True)
        else:
            self._make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:
            # If it is gone again, a delete elsewhere was faster than this look at it: that is a FileNotFoundError.
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise
        # Also when it was there: who made it may not have come to sync it yet.
        if self.capabilities.durable:
            posix.sync_folder(folder.parent)
        self._settled.add(folder)

    # Get, list, delete

    def _read_steps(self, key: str, offset: int, out: memoryview) -> Generator[None]:
        descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not posix.is_object(status):
                raise self._absent(key)
            if offset + len(out) > status.st_size:
                raise past_end(key, offset, len(out), status.st_size, url=self.url)
            done = 0
            while done < len(out):
                num_bytes = os.preadv(descriptor, [out[done : done + _CHUNK_BYTES]], offset + done)
                if num_bytes == 0:
                    raise past_end(key, offset, len(out), os.fstat(descriptor).st_size, url=self.url)
                done += num_bytes
                if done < len(out):
                    yield
        finally:
            os.close(descriptor)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield in order of keys: a folder sorts as its name with the slash that its keys have."""
        folder, _, stem = prefix.rpartition("/")
        head = folder + "/" if folder else ""
        if head.startswith(TEMP_FOLDER + "/"):
            return
        try:
            with os.scandir(self.root / folder) as entries:
                found = sorted(_sort_name(entry) for entry in entries if entry.name.startswith(stem))
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in found:
            if name.endswith("/"):
                yield from self._walk(head + name)
                continue
            with contextlib.suppress(FileNotFoundError):
                status = (self.root / f"{head}{name}").stat()
                if posix.is_object(status):
                    yield _info(head + name, status)

    def _remove(self, path: Path) -> None:
        path.unlink()
        folder = path.parent
        if self.capabilities.durable:
            posix.sync_folder(folder)
        with contextlib.suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                self._settled.discard(folder)
                folder = folder.parent

    def _find_temps(self) -> Sequence[Leftover]:
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._temp_root) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append(
                        Leftover(
                            name=entry.name,
                            key=urllib.parse.unquote(entry.name.partition("~")[2]),
                            size_bytes=status.st_size,
                            modified_seconds=status.st_mtime,
                        )
                    )
        return sorted(found, key=lambda leftover: leftover.name)


def _take(walk: Iterator[ObjectInfo], count: int) -> Sequence[ObjectInfo]:
    return tuple(itertools.islice(walk, count))


def _read_file(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        return file.readall()


def _sort_name(entry: os.DirEntry[str]) -> str:
    return entry.name + "/" if entry.is_dir() else entry.name


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=status.st_size, modified_seconds=status.st_mtime)
