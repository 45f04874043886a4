"""Threads that use torch: what must be settled before several of them begin, in a process that may be a forked one.

After a fork torch makes its pool of threads anew at first use, and without a lock: of several threads that come first
at the same moment, some find none and fail ("Invalid thread pool").
"""

from __future__ import annotations

import os
import threading

import torch


class _Settled:
    """Whether this process's torch has its pool; not that of the parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0

    def forked(self) -> None:
        """Be new, in a child: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def settle(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                torch.set_num_threads(torch.get_num_threads())  # asks for the pool, and changes nothing
                self._pid = os.getpid()


_settled = _Settled()
os.register_at_fork(after_in_child=_settled.forked)


def settle_torch() -> None:
    """Have torch make what its threads share, if a fork took it away; call it before starting threads."""
    _settled.settle()
