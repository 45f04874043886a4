"""A target at any fsspec URL: files are streamed, and an interrupted conversion goes on with the file it was at.

An object store shows an upload only when it is complete, so a file has its final name from the start; elsewhere it is
written in the scratch area and moved.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import fsspec
from blake3 import blake3

from vescale_ckpt.errors import InternalError, StorageError, VeScaleError
from vescale_ckpt.interop.convert.target import Done, Target
from vescale_storage.backends.fsspec_errors import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vescale_ckpt.interop.convert.files import TargetFile

_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
_BLOCK_BYTES: Final = 16 << 20


class RemoteTarget(Target):
    """A prefix, or one object, at a URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None, *, is_file: bool) -> None:
        url = url.rstrip("/")
        super().__init__(url, url.rpartition("/")[2] if is_file else "")
        scheme = url.partition("://")[0]
        self._whole_only = scheme in _OBJECT_STORES
        self._fs, path = fsspec.url_to_fs(url, **{"use_listings_cache": False, **(storage_options or {})})
        self._root = path.rpartition("/")[0] if is_file else path.rstrip("/")

    @contextlib.contextmanager
    def _translated(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except VeScaleError:
            raise
        except Exception as error:  # client libraries raise what they like
            raise translate(error, action, name, url=self.url) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def get(self, name: str) -> bytes | None:
        """Return a small file; None where it is not."""
        with self._translated("get", name):
            try:
                data: bytes = self._fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        return data

    def put(self, name: str, data: bytes) -> None:
        """Write a small object."""
        with self._translated("put", name):
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._path(name), data)

    def present(self) -> list[str]:
        """Return what is there, without scratch."""
        self._fs.invalidate_cache()
        with self._translated("list", ""):
            if self._file_name:
                return [self._file_name] if self._fs.exists(self._path(self._file_name)) else []
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return sorted(name for name in names if name and name != self.scratch and name != self._root.rpartition("/")[2])

    def write(
        self,
        number: int,
        file: TargetFile,
        overflows: Callable[[], dict[str, int]],
        advance: Callable[[int], None],
    ) -> Done:
        """Stream a file; one that was finished by an earlier attempt is not written again."""
        found = self.done(number)
        if found is not None and self._size(number, found.name) == found.num_bytes:
            found.resumed_bytes = found.num_bytes
            advance(found.num_bytes)
            return found
        hasher, overflowed, written = blake3(), dict[str, int](), 0
        with self._translated("put", file.name), self._upload(self._place(number, file.name)) as out:
            for part in file.parts():
                data = part.make()
                for name, count in overflows().items():
                    overflowed[name] = overflowed.get(name, 0) + count
                for start in range(0, len(data), _BLOCK_BYTES):
                    out.write(bytes(memoryview(data)[start : start + _BLOCK_BYTES]))
                hasher.update(data)
                part.seen(data)
                written += len(data)
                advance(len(data))
            if written != file.num_bytes:
                raise InternalError(f"wrote {written} bytes of {file.name!r}, planned {file.num_bytes}")
        if self._size(number, file.name) != written:
            raise StorageError(f"cannot write {file.name!r} to {self.url}: what is there has another size")
        done = Done(file.name, written, hasher.hexdigest(), overflowed)
        self.record(number, done)
        return done

    @contextlib.contextmanager
    def _upload(self, path: str) -> Iterator[Any]:
        """Yield a stream whose bytes become an object only if the block ends well."""
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        out = self._fs.open(path, "wb", block_size=_BLOCK_BYTES)
        try:
            yield out
        except BaseException:
            with contextlib.suppress(Exception):
                out.discard()
            with contextlib.suppress(AttributeError):  # of streams that upload nothing when they are closed
                out.closed = True  # closing would complete the upload
            if not self._whole_only:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(path)
            raise
        out.close()

    def _place(self, number: int, name: str) -> str:
        return self._path(name if self._whole_only else f"{self.scratch}/{number}.part")

    def _size(self, number: int, name: str) -> int:
        self._fs.invalidate_cache()
        for path in (self._place(number, name), self._path(name)):
            try:
                return int(self._fs.info(path)["size"])
            except FileNotFoundError:
                continue
        return -1

    def publish(self, number: int, name: str) -> None:
        """Move a finished file to its name where it is not there yet."""
        source = self._place(number, name)
        if self._whole_only:
            return
        with self._translated("move", name):
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._fs.mv(source, self._path(name))

    def clean(self) -> None:
        """Remove the scratch area."""
        with self._translated("delete", self.scratch), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(self.scratch), recursive=True)
