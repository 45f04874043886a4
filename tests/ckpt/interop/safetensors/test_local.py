from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vescale_ckpt.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptionError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
)
from vescale_ckpt.interop.safetensors.local import file_errors

PATH = Path("/somewhere/x")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EACCES, AccessDeniedError),
        (errno.EROFS, AccessDeniedError),
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.ENOENT, ObjectNotFoundError),
        (errno.EIO, StorageError),
        (errno.ENOTDIR, StorageError),
    ],
)
def test_an_os_error_becomes_ours_and_names_the_file(code, expected):
    with pytest.raises(expected, match="cannot write /somewhere/x") as caught, file_errors("write", PATH):
        raise OSError(code, os.strerror(code))
    assert type(caught.value) is expected


def test_an_os_error_without_a_number_keeps_its_text():
    with pytest.raises(StorageError, match="odd"), file_errors("write", PATH):
        raise OSError("odd")


@pytest.mark.parametrize(
    "error",
    [CorruptionError("a"), AlreadyExistsError("b"), ObjectNotFoundError("c"), StorageError("d"), ValueError("e")],
)
def test_errors_of_ours_and_of_others_pass(error):
    with pytest.raises(type(error)) as caught, file_errors("write", PATH):
        raise error
    assert caught.value is error
