"""Objects on any file system that fsspec knows: synchronous ones on threads, asynchronous ones on our own loop.

Meant for object stores (``gs://``, ``abfs://``, ...): a file system that shows a file while it is being written breaks
the promise that objects are whole or absent. S3 has a back end of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import time
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import fsspec
import fsspec.asyn

from vescale_storage.backend import Backend, Capabilities, ObjectInfo, Payload
from vescale_storage.backends.checks import check_key, check_prefix, check_range, past_end
from vescale_storage.backends.fsspec_errors import is_past_end, is_taken, translate
from vescale_storage.backends.threads import StuckError, Threads, stuck
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
    VeScaleError,
)
from vescale_storage.payload import payload_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

_NUM_THREADS: Final = 16
_INLINE_BYTES: Final = 2**20
"""A larger copy is made on a thread, so that it does not hold the event loop."""
_MAX_OBJECT_BYTES: Final = 5 * 2**40
_CHANGES: Final = frozenset({"makedirs", "rm_file"})
_IN_PROCESS: Final = frozenset({"memory"})
_EXTRAS: Final = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""Scheme -> the extra of this package that brings its file system."""
_CLIENT_FIELDS: Final = ("_s3", "_session", "service_client")
"""Where s3fs, gcsfs and http, and adlfs keep what they have opened; fsspec has no word for it."""
_TIME_FIELDS: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created", "creation_time")


class FsspecBackend(Backend):
    """Objects under the path of an fsspec URL.

    Args:
        url: any URL that ``fsspec`` understands.
        options: for the file system's class.
        filesystem: use this one instead of making one; an asynchronous one must be ``asynchronous=True``.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        filesystem: fsspec.AbstractFileSystem | None = None,
    ) -> None:
        self.url = _without_secrets(url)
        self._filesystems = _Filesystems(url, dict(options or {}), self.url, filesystem)
        first = self._filesystems.any()
        protocols = {first.protocol} if isinstance(first.protocol, str) else set(first.protocol)
        in_process = bool(protocols & _IN_PROCESS)
        self._root: str = first._strip_protocol(url).rstrip("/")  # noqa: SLF001 - every fsspec class has it
        self._creates = _has_create_mode(first)
        self._threads = Threads(_NUM_THREADS, name="vescale-fsspec")
        self.capabilities = Capabilities(
            conditional_put=self._creates,
            durable=not in_process,
            shared=not in_process,
            max_object_bytes=_MAX_OBJECT_BYTES,
            put_concurrency=4,
            get_concurrency=_NUM_THREADS,
        )

    async def put(self, key: str, payload: Payload) -> None:
        """Write the joined payload with ``pipe_file``."""
        path = self._path(key)
        with self._translated("put", key):
            await self._pipe(path, await self._joined(key, payload))

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Write with ``pipe_file(mode="create")``, or where there is no such mode look first and write then."""
        path = self._path(key)
        content = await self._joined(key, payload)
        with self._translated("put", key):
            if not self._creates:
                if await self._exists(path):
                    raise self._taken(key)
                await self._pipe(path, content)
                return
            try:
                await self._pipe(path, content, mode="create")
            except Exception as error:
                if is_taken(error):
                    raise self._taken(key) from error
                raise

    async def get(self, key: str) -> bytes:
        """Return what ``cat_file`` does."""
        path = self._path(key)
        with self._translated("get", key):
            return bytes(await self._call("cat_file", path))

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Copy what ``cat_file`` returns for the range."""
        check_range(key, offset, url=self.url)
        path = self._path(key)
        with self._translated("get", key):
            found = await self._cat_range(path, offset, len(out))
            if len(found) == len(out) > 0:
                out[:] = found
                return
            size_bytes = (await self._info(path))["size"]
        if offset + len(out) > size_bytes:
            raise past_end(key, offset, len(out), size_bytes, url=self.url)
        if len(found) != len(out):
            raise StorageError(
                f"cannot get bytes {offset}..{offset + len(out)} of {key!r} in {self.url}: "
                f"the answer has {len(found)} bytes",
                retryable=True,
                key=key,
            )

    async def head(self, key: str) -> ObjectInfo:
        """Return what ``info`` does."""
        path = self._path(key)
        with self._translated("head", key):
            return _object_info(key, await self._info(path))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield what ``ls`` shows, folder by folder; ``find`` would pass over folders that it cannot read."""
        check_prefix(prefix, url=self.url)
        async for info in self._walk(prefix):
            yield info

    async def delete(self, key: str) -> None:
        """Remove with ``rm_file``."""
        path = self._path(key)
        with contextlib.suppress(ObjectNotFoundError), self._translated("delete", key):
            try:
                await self._call("rm_file", path)
            except (FileNotFoundError, KeyError):
                return

    async def close(self) -> None:
        """Let the threads end, and close the connections of this loop's file system."""
        self._threads.close()
        await self._filesystems.close_here()

    def _path(self, key: str) -> str:
        check_key(key, url=self.url)
        return f"{self._root}/{key}"

    async def _joined(self, key: str, payload: Payload) -> bytes:
        num_bytes = payload_bytes(payload)
        if num_bytes > _MAX_OBJECT_BYTES:
            raise InvalidInputError(
                f"cannot put {key!r} in {self.url}: {num_bytes} bytes are more than {_MAX_OBJECT_BYTES}", key=key
            )
        # A copy of its own: some file systems keep what they are given, and the caller's buffers are used again.
        if num_bytes <= _INLINE_BYTES:
            return b"".join(payload)
        return await self._threads.run(b"".join, payload)

    def _taken(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError(f"cannot create {key!r} in {self.url}: an object is there", key=key)

    @contextlib.contextmanager
    def _translated(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except VeScaleError:
            raise
        except StuckError as error:
            raise stuck(action, key, url=self.url) from error
        except Exception as error:
            # Client libraries raise what they like; all of it ends here.
            raise translate(error, action, key, url=self.url) from error

    # The file system, synchronous or not

    async def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        filesystem = self._filesystems.here()
        if filesystem.async_impl:
            return await getattr(filesystem, f"_{method}")(*args, **kwargs)
        run = self._threads.run if method in _CHANGES else self._threads.run_abandonable
        return await run(getattr(filesystem, method), *args, **kwargs)

    async def _cat_range(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Return the range, or less where it leaves the object."""
        if not num_bytes:
            return b""
        try:
            found: bytes = await self._call("cat_file", path, start=offset, end=offset + num_bytes)
        except Exception as error:
            if is_past_end(error):
                return b""
            raise
        return found

    async def _pipe(self, path: str, content: bytes, **mode: str) -> None:
        try:
            await self._pipe_once(path, content, **mode)
        except FileNotFoundError:
            # Not an object store: its folders have to be made.
            await self._call("makedirs", path.rsplit("/", 1)[0], exist_ok=True)
            await self._pipe_once(path, content, **mode)

    async def _pipe_once(self, path: str, content: bytes, **mode: str) -> None:
        filesystem = self._filesystems.here()
        if filesystem.async_impl:
            await filesystem._pipe_file(path, content, **mode)  # noqa: SLF001 - fsspec's public async interface
        else:
            await self._threads.run(_pipe_locked, filesystem, path, content, **mode)

    async def _exists(self, path: str) -> bool:
        try:
            await self._info(path)
        except FileNotFoundError:
            return False
        return True

    async def _info(self, path: str) -> Mapping[str, Any]:
        self._filesystems.here().invalidate_cache()
        info: Mapping[str, Any] = await self._call("info", path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return info

    async def _walk(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        folder, _, stem = prefix.rpartition("/")
        head = f"{folder}/" if folder else ""
        for name, info in sorted(await self._ls(head, stem), key=itemgetter(0)):
            if not name.endswith("/"):
                yield _object_info(head + name, info)
                continue
            async for inner in self._walk(head + name):
                yield inner

    async def _ls(self, head: str, stem: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Return the entries of a folder whose names begin with ``stem``, a folder's with its slash at the end."""
        path = f"{self._root}/{head}".rstrip("/")
        self._filesystems.here().invalidate_cache()
        with self._translated("list", head + stem):
            try:
                found = await self._call("ls", path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            entries = []
            for info in found:
                whole = self._filesystems.here()._strip_protocol(info["name"])  # noqa: SLF001 - every class has it
                # Some show the folder itself, or the object that has the folder's name.
                if whole.rstrip("/") != path.rstrip("/"):
                    name = whole.rstrip("/").rpartition("/")[2]
                    if name.startswith(stem):
                        entries.append((name + ("/" if info["type"] == "directory" else ""), info))
            return entries


class _Filesystems:
    """The file system object of a URL: one in all if its class is synchronous, else one for every event loop."""

    def __init__(
        self, url: str, options: dict[str, Any], shown_url: str, given: fsspec.AbstractFileSystem | None
    ) -> None:
        self._url = url
        self._options = options
        self._shown_url = shown_url
        self._given = given
        self._first = given if given is not None else self._make()
        self._by_loop: dict[asyncio.AbstractEventLoop, tuple[int, fsspec.AbstractFileSystem]] = {}

    def any(self) -> fsspec.AbstractFileSystem:
        """Return one to ask about its class; it must not be used for I/O if it is asynchronous."""
        return self._first

    def here(self) -> fsspec.AbstractFileSystem:
        """Return the one for the running loop: connections belong to the loop and the process that opened them."""
        if self._given is not None or not self._first.async_impl:
            return self._first
        loop = asyncio.get_running_loop()
        pid, filesystem = self._by_loop.get(loop, (0, None))
        if pid != os.getpid():
            for other in tuple(self._by_loop):
                if other.is_closed():
                    self._by_loop.pop(other, None)
            filesystem = self._make()
            self._by_loop[loop] = (os.getpid(), filesystem)
        return filesystem

    async def close_here(self) -> None:
        """Close the connections of the running loop, where the class has them in one of the usual places."""
        pid, filesystem = self._by_loop.pop(asyncio.get_running_loop(), (0, None))
        if pid != os.getpid():
            return
        for name in _CLIENT_FIELDS:
            close = getattr(getattr(filesystem, name, None), "close", None)
            if inspect.iscoroutinefunction(close):
                await close()

    def _make(self) -> fsspec.AbstractFileSystem:
        scheme = self._url.partition("://")[0]
        try:
            kind = fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            if scheme in _EXTRAS:
                message = f"{error}; pip install 'vescale-ckpt[{_EXTRAS[scheme]}]'"
                raise ConfigError(f"cannot open {self._shown_url}: {message}") from error
            if isinstance(error, ImportError):
                raise ConfigError(f"cannot open {self._shown_url}: {error}") from error
            known = ", ".join(fsspec.available_protocols())
            raise ConfigError(f"cannot open {self._shown_url}: unknown scheme {scheme!r}; known are {known}") from error
        extra = {"asynchronous": True} if kind.async_impl else {}
        try:
            options = {**kind._get_kwargs_from_urls(self._url), **self._options, **extra}  # noqa: SLF001 - as url_to_fs
            return kind(skip_instance_cache=True, **options)
        except ImportError as error:
            raise ConfigError(f"cannot open {self._shown_url}: {error}") from error
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"cannot open {self._shown_url} with these storage_options: {error}") from error


# Several in-process file systems look for the object and then write it, so creates of one path must not overlap.
_create_locks = [threading.Lock() for _ in range(64)]


def _renew_locks() -> None:
    _create_locks[:] = [threading.Lock() for _ in _create_locks]


os.register_at_fork(after_in_child=_renew_locks)


def _pipe_locked(filesystem: fsspec.AbstractFileSystem, path: str, content: bytes, **mode: str) -> None:
    lock = _create_locks[hash(path) % len(_create_locks)] if mode else contextlib.nullcontext()
    with lock:
        filesystem.pipe_file(path, content, **mode)


def _has_create_mode(filesystem: fsspec.AbstractFileSystem) -> bool:
    """Return whether the class writes create-only by itself; what it inherits only looks first and writes then."""
    if filesystem.async_impl:
        own, inherited = type(filesystem)._pipe_file, fsspec.asyn.AsyncFileSystem._pipe_file  # noqa: SLF001
    else:
        own, inherited = type(filesystem).pipe_file, fsspec.AbstractFileSystem.pipe_file
    return own is not inherited and "mode" in inspect.signature(own).parameters


def _object_info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=int(info["size"]), modified_seconds=_modified_seconds(info))


def _modified_seconds(info: Mapping[str, Any]) -> float:
    for name in _TIME_FIELDS:
        found = info.get(name)
        if isinstance(found, str):
            found = datetime.fromisoformat(found)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
    # An age that is unknown must never pass for old: a collector deletes by age.
    return time.time()


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return url.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)
