"""The files of a folder on this machine, where names are links too.

A link is followed only inside the folder. Hugging Face's cache is the one layout whose links leave it: into its own
``blobs``.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import CorruptionError, FormatError, NotFoundError, ObjectNotFoundError
from vescale_ckpt.interop.foreign.files import MAX_FILES, SCRATCH_PREFIX, Files, check_name
from vescale_ckpt.interop.safetensors.local import file_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN_FILES: Final = 64


class LocalFiles(Files):
    """A folder of this machine, or one file of it."""

    def __init__(self, root: Path, *, only: str = "") -> None:
        super().__init__(str(root / only))
        self._root = root
        self._real = Path(os.path.realpath(root))
        self._only = only
        self._open: OrderedDict[str, tuple[int, os.stat_result]] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return self._status(name).st_size

    def path(self, name: str) -> Path:
        """Return where a file really is, for who maps it."""
        check_name(name, self.url)
        path = self._root / name
        real = Path(os.path.realpath(path))
        if name != self._only and not self._allowed(real):
            raise FormatError(
                f"cannot read {name!r} of {self.url}: it is a link that leads out of the folder, to {real}", path=name
            )
        return real

    def _allowed(self, real: Path) -> bool:
        if real.is_relative_to(self._real):
            return True
        parent = self._real.parent  # <repo>/snapshots/<revision>/file -> <repo>/blobs/<digest>
        return parent.name == "snapshots" and real.is_relative_to(parent.parent / "blobs")

    def _status(self, name: str) -> os.stat_result:
        with self._opened(name) as (_, status):
            return status

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        with self._lock:
            entry = self._open.pop(name, None)
        if entry is None:
            entry = self._open_file(name)
        try:
            yield entry
        finally:
            with self._lock:
                other = self._open.setdefault(name, entry)
                extra = [entry] if other is not entry else []
                while len(self._open) > _OPEN_FILES:
                    extra.append(self._open.popitem(last=False)[1])
            for descriptor, _ in extra:
                os.close(descriptor)

    def _open_file(self, name: str) -> tuple[int, os.stat_result]:
        real = self.path(name)
        with file_errors("read", self._root / name):
            # Without O_NONBLOCK the opening of a pipe waits for its other end.
            descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise ObjectNotFoundError(f"cannot read {name!r} of {self.url}: it is no file", path=name)
        return descriptor, status

    def _read_into(self, name: str, offset: int, out: memoryview) -> None:
        done = 0
        with self._opened(name) as (descriptor, _), file_errors("read", self._root / name):
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], offset + done)
                if not count:
                    raise CorruptionError(
                        f"cannot read bytes {offset}..{offset + len(out)} of {name!r} in {self.url}: it ends at "
                        f"{os.fstat(descriptor).st_size}; it was cut",
                        path=name,
                    )
                done += count

    def _modified(self, name: str) -> float:
        return self._status(name).st_mtime_ns

    def _list(self) -> dict[str, int]:
        if self._only:
            return {self._only: self.size(self._only)}
        found: dict[str, int] = {}
        with file_errors("look into", self._root):
            for folder, folders, names in os.walk(self._root):  # links to folders are not followed
                folders[:] = [name for name in folders if not name.startswith(SCRATCH_PREFIX)]
                base = Path(folder).relative_to(self._root).as_posix()
                for name in names:
                    full = name if base == "." else f"{base}/{name}"
                    with contextlib.suppress(NotFoundError, FormatError):
                        found[full] = self.size(full)
                if len(found) > MAX_FILES:
                    raise FormatError(f"cannot read {self.url}: it has more than {MAX_FILES} files")
        return found

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            entries = list(self._open.values())
            self._open.clear()
        for descriptor, _ in entries:
            os.close(descriptor)
