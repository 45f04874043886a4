import asyncio
import errno

import pytest

from vescale_storage.backends.fsspec_errors import is_past_end, is_taken, translate
from vescale_storage.errors import (
    AccessDeniedError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)


class HttpError(Exception):
    """As many client libraries have one."""

    def __init__(self, status):
        super().__init__("what the server says")
        self.status_code = status


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (FileNotFoundError("k"), ObjectNotFoundError, None),
        (IsADirectoryError("k"), ObjectNotFoundError, None),
        (PermissionError("no"), AccessDeniedError, False),
        (OSError(errno.EACCES, "no"), AccessDeniedError, False),
        (OSError("403 Forbidden"), AccessDeniedError, False),
        (OSError("ExpiredToken: the token has expired"), AccessDeniedError, False),
        (HttpError(401), AccessDeniedError, False),
        (HttpError(429), ThrottledError, True),
        (HttpError(503), ThrottledError, True),
        (OSError("SlowDown"), ThrottledError, True),
        (HttpError(500), StorageError, True),
        (HttpError(400), StorageError, False),
        (OSError(errno.ENOSPC, "full"), NoSpaceError, False),
        (TimeoutError(), StorageTimeoutError, True),
        (asyncio.TimeoutError(), StorageTimeoutError, True),  # noqa: UP041 - both names
        (OSError(errno.ETIMEDOUT, "late"), StorageTimeoutError, True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), StorageError, True),
        (OSError("something without a number"), StorageError, True),
        (OSError(errno.EINVAL, "wrong"), StorageError, False),
        (ValueError("odd"), StorageError, False),
    ],
)
def test_translate(error, kind, retryable):
    found = translate(error, "get", "a/b", url="gs://bucket")
    assert type(found) is kind
    assert getattr(found, "retryable", None) is retryable
    assert found.context == {"key": "a/b"}
    assert "cannot get 'a/b' in gs://bucket" in str(found)


def test_numbers_in_a_key_mean_nothing():
    error = OSError(errno.EINVAL, "cannot read refs/run/403")
    assert type(translate(error, "get", "refs/run/403", url="u")) is StorageError


def test_a_missing_folder_at_a_put_is_no_missing_object():
    found = translate(FileNotFoundError("parent"), "put", "a/b", url="u")
    assert type(found) is StorageError
    assert "parent" in str(found)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "taken"),
    [
        (FileExistsError("k"), True),
        (HttpError(412), True),
        (caused(OSError(errno.EINVAL, "a condition"), RuntimeError("(PreconditionFailed) when calling")), True),
        (OSError("BlobAlreadyExists"), True),
        (HttpError(403), False),
        (OSError(errno.EINVAL, "other"), False),
    ],
)
def test_refused_creates(error, taken):
    assert is_taken(error) is taken


@pytest.mark.parametrize(
    ("error", "past"),
    [
        (HttpError(416), True),
        (OSError("Requested Range Not Satisfiable"), True),
        (OSError("InvalidRange"), True),
        (HttpError(404), False),
    ],
)
def test_ranges_behind_the_end(error, past):
    assert is_past_end(error) is past
