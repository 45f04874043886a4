import errno
import os

import pytest

from vescale_storage.backends import posix
from vescale_storage.errors import (
    AccessDeniedError,
    InvalidInputError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
)


def translated(code, action="put"):
    return posix.translate(OSError(code, os.strerror(code)), action, "a/b", url="/root")


@pytest.mark.parametrize(
    ("code", "action", "kind", "retryable"),
    [
        (errno.ENOENT, "get", ObjectNotFoundError, None),
        (errno.ENOTDIR, "head", ObjectNotFoundError, None),
        (errno.EISDIR, "get", ObjectNotFoundError, None),
        (errno.ENOENT, "put", StorageError, False),
        (errno.ENOTDIR, "put", StorageError, False),
        (errno.ENAMETOOLONG, "put", InvalidInputError, None),
        (errno.EACCES, "get", AccessDeniedError, False),
        (errno.EPERM, "put", AccessDeniedError, False),
        (errno.EROFS, "put", AccessDeniedError, False),
        (errno.ENOSPC, "put", NoSpaceError, False),
        (errno.EDQUOT, "put", NoSpaceError, False),
        (errno.ETIMEDOUT, "get", StorageTimeoutError, True),
        (errno.ESTALE, "get", StorageError, True),
        (errno.EMFILE, "get", StorageError, True),
        (errno.EIO, "put", StorageError, True),
        (errno.EINVAL, "put", StorageError, False),
    ],
)
def test_translate(code, action, kind, retryable):
    found = translated(code, action)
    assert type(found) is kind
    assert getattr(found, "retryable", None) is retryable
    assert found.context == {"key": "a/b"}
    assert "'a/b' in /root" in str(found)


def test_an_error_without_number():
    found = posix.translate(OSError("odd"), "put", "k", url="/root")
    assert type(found) is StorageError
    assert "odd" in str(found)


def test_write_all_goes_on_after_a_short_write(tmp_path, monkeypatch):
    writev = os.writev
    sizes = iter([0, 3, 1, 8, *[100] * 50])

    def short(descriptor, views):
        left, some = next(sizes), []
        for view in views:
            some.append(view[:left])
            left -= len(some[-1])
        return writev(descriptor, some)

    monkeypatch.setattr(os, "writev", short)
    descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_WRONLY)
    posix.write_all(descriptor, [memoryview(b"abcd"), memoryview(b"e"), memoryview(b"fghijklmnopqrst")])
    os.close(descriptor)
    assert (tmp_path / "f").read_bytes() == b"abcdefghijklmnopqrst"


def test_sync(tmp_path):
    descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"x")
    posix.start_writeback(descriptor, 0, 1)
    posix.sync_file(descriptor)
    os.close(descriptor)
    posix.sync_folder(tmp_path)


@pytest.mark.parametrize(("code", "passes"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_file_systems_that_cannot_sync_folders(tmp_path, monkeypatch, code, passes):
    def fail(_):
        raise OSError(code, "x")

    monkeypatch.setattr(os, "fsync", fail)
    closed = []
    close = os.close
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    if passes:
        posix.sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match="x"):
            posix.sync_folder(tmp_path)
    assert len(closed) == 1


def test_only_regular_files_are_objects(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    os.mkfifo(tmp_path / "p")
    assert posix.is_object((tmp_path / "f").stat())
    assert not posix.is_object((tmp_path / "p").stat())
    assert not posix.is_object(tmp_path.stat())
