"""Mapped memory: CPU tensors in one file on disk, for a state that is larger than what this host can hold.

The pages that are in use stay in memory as long as the system has room for them; all others are in the file.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vescale_ckpt.errors import NoSpaceError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALIGNED_BYTES = 64
"""Tensors begin at multiples of this: a cache line, and more than any item needs."""


class MappedMemory:
    """New tensors in one new file.

    The file is there until somebody deletes it, and may be deleted while tensors in it are in use. Each tensor keeps
    the mapping alive and has a storage of its own size.

    Args:
        folder: where the file is made; the folder, too, if it is not there.
        sizes: bytes of every tensor that will be asked for, in any order.

    Raises:
        NoSpaceError: the disk has not so much room; nothing is left there.
        StorageError: the file cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], sizes: Iterable[int]) -> None:
        self.num_bytes = sum(_aligned(size) for size in sizes)
        self._next = 0
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix="state-", suffix=".bin", dir=folder)
        except OSError as error:
            raise StorageError(f"cannot make a file for tensors in {os.fspath(folder)}: {error}") from error
        self.path = Path(name)
        try:
            self._map = _mapping(descriptor, self.num_bytes) if self.num_bytes else None
        except OSError as error:
            self.path.unlink()
            kind = NoSpaceError if error.errno in {errno.ENOSPC, errno.EDQUOT} else StorageError
            raise kind(f"cannot make a file of {self.num_bytes:,} bytes in {os.fspath(folder)}: {error}") from error
        finally:
            os.close(descriptor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros in the file."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes or self._map is None:
            return torch.empty(shape, dtype=dtype)
        start, self._next = self._next, self._next + _aligned(num_bytes)
        raw = np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=start)
        return torch.from_numpy(raw).view(dtype).view(shape)

    def let_go(self) -> None:
        """Take the pages that were written out of this process's memory; they are in the system's and in the file."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _mapping(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Return a file's memory, after its blocks were reserved: a full disk is no error but a signal later on."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)
    return mmap.mmap(descriptor, num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
