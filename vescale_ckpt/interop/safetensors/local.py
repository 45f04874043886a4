"""Files of this machine: what the operating system says about them, as the package's errors."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import AccessDeniedError, NoSpaceError, ObjectNotFoundError, StorageError, VeScaleError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def file_errors(action: str, path: Path) -> Iterator[None]:
    """Raise an OSError of the block as the package's error for ``action`` on ``path``.

    Raises:
        AccessDeniedError: the owner, the mode or the mount does not allow it.
        NoSpaceError: the disk or the quota is full.
        ObjectNotFoundError: there is no such file.
        StorageError: anything else.
    """
    try:
        yield
    except VeScaleError:  # some are an OSError too
        raise
    except FileNotFoundError as error:
        raise ObjectNotFoundError(f"cannot {action} {path}: there is no such file", path=str(path)) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        message = f"cannot {action} {path}: {reason}"
        if error.errno in _DENIED:
            raise AccessDeniedError(f"{message}; check its owner, mode and mount", path=str(path)) from error
        if error.errno in _NO_SPACE:
            raise NoSpaceError(f"{message}; free space or choose another disk", path=str(path)) from error
        raise StorageError(message, path=str(path)) from error
