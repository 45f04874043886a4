"""Where URLs become files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import InvalidInputError, ObjectNotFoundError
from vescale_ckpt.interop.foreign.local_files import LocalFiles
from vescale_ckpt.interop.foreign.remote_files import RemoteFiles
from vescale_ckpt.interop.safetensors.local import file_errors
from vescale_storage.backends import open_backend
from vescale_storage.backends.fsspec import FsspecBackend
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_ckpt.interop.foreign.files import Files
    from vescale_storage.backend import Backend

_LOCAL: Final = frozenset({"", "file", "local"})


def local_path(url: str) -> Path | None:
    """Return the path of a URL that is of this machine, None for any other."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in _LOCAL:
        return None
    return Path(rest if separator else url).expanduser().absolute()


def open_files(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Files, str]:
    """Return the folder of a URL, and the name of the one file in it that the URL names, or an empty string.

    Raises:
        NotFoundError: nothing is there.
        InvalidInputError: the URL cannot be understood.
        StorageError: the place cannot be reached.
    """
    text = os.fspath(url)
    path = local_path(text)
    if path is None:
        return _open_remote(text.rstrip("/"), storage_options)
    with file_errors("look into", path):
        mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        return LocalFiles(path), ""
    if not stat.S_ISREG(mode):
        raise InvalidInputError(f"cannot open {path}: it is neither a file nor a folder", path=str(path))
    return LocalFiles(path.parent, only=path.name), path.name


def _open_remote(url: str, options: Mapping[str, Any] | None) -> tuple[Files, str]:
    parent, _, name = url.rpartition("/")
    if name and not parent.endswith(":/") and parent.rpartition("://")[2]:
        files = RemoteFiles(_backend(parent, options), only=name)
        if files.has(name):
            return files, name
        files.close()
    files = RemoteFiles(_backend(url, options))
    if not files.names():
        files.close()
        raise ObjectNotFoundError(f"cannot open {url}: there is neither such a file nor a folder with files", path=url)
    return files, ""


def _backend(url: str, options: Mapping[str, Any] | None) -> Backend:
    # The store's own memory:// is another place than fsspec's, where other programs put their files.
    inner = FsspecBackend(url, dict(options or {})) if url.startswith("memory://") else open_backend(url, options)
    return RetryBackend(inner, RetryPolicy())
