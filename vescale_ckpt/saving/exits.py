"""Exits: what becomes of background saves when the process ends.

At the interpreter's end saves under way are finished, within bounds; one that failed and that nobody was told of is
reported. A SIGTERM ends a process without that, unless ``finish_on_sigterm`` was called.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from vescale_ckpt.errors import VeScaleError

if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

    from vescale_ckpt.saving.handle import SaveHandle

_log = logging.getLogger(__name__)

EXIT_SECONDS = 600.0
"""How long the interpreter's end waits for one background save."""

_under_way: list[tuple[int, SaveHandle]] = []
"""(process, save), held here: a checkpointer that was made in a function is gone when that returns or raises."""
_registered = threading.Event()


def finish_at_exit(handle: SaveHandle) -> None:
    """Let a save end before the interpreter does, whoever has forgotten it by then."""
    _under_way[:] = [(pid, other) for pid, other in _under_way if not other.done or other.forgotten]
    _under_way.append((os.getpid(), handle))
    if not _registered.is_set():
        _registered.set()
        # Thread pools refuse work from the moment that threading shuts down, which is before any atexit function: so
        # this has to be one of threading's own, which run last come, first served.
        getattr(threading, "_register_atexit", atexit.register)(_finish)


def finish_on_sigterm() -> None:
    """Make SIGTERM end this process as ``sys.exit(143)`` would, so that saves under way are finished first.

    Call it once, on the main thread. Schedulers send SIGTERM some time before SIGKILL; what is not committed by then is
    as if it had never been begun.
    """
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 -- the signature of a handler
    sys.exit(128 + number)


def _finish() -> None:
    for pid, handle in _under_way:
        if pid == os.getpid() and (not handle.done or handle.forgotten):
            try:
                handle.result(EXIT_SECONDS)
            except VeScaleError as error:
                _log.error("at exit: the save of %s@%d failed: %s", handle.run, handle.step, error)
