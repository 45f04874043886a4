"""What a test of storage needs again and again: compare, expect a refusal, read a range, list keys, fork.

Plain functions that raise AssertionError, so that a suite shipped with the package needs no test library.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vescale_storage.errors import VeScaleError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vescale_storage.backend import Backend

ErrorT = TypeVar("ErrorT", bound=VeScaleError)

_CHILD_SECONDS: Final = 60.0


def equal(found: object, wanted: object, what: str) -> None:
    """Raise AssertionError unless both are equal; long values are shortened in the message."""
    if found != wanted:
        raise AssertionError(f"{what}: found {_short(found)}, expected {_short(wanted)}")


def true(found: bool, what: str) -> None:
    """Raise AssertionError unless the condition holds."""
    if not found:
        raise AssertionError(f"does not hold: {what}")


async def refused(kind: type[ErrorT], attempt: Awaitable[Any]) -> ErrorT:
    """Return the error of this kind that the attempt raises; any other outcome is an AssertionError."""
    try:
        outcome = await attempt
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, but the call returned {_short(outcome)}")


async def read(backend: Backend, key: str, offset: int, num_bytes: int) -> bytes:
    """Return a range as bytes."""
    out = bytearray(num_bytes)
    await backend.get_into(key, offset, memoryview(out))
    return bytes(out)


async def keys_of(backend: Backend, prefix: str) -> list[str]:
    """Return the keys of a listing, in its order."""
    return [info.key async for info in backend.list(prefix)]


def pattern(num_bytes: int, *, seed: int) -> bytes:
    """Return bytes in which every misplaced piece shows."""
    return random.Random(seed).randbytes(num_bytes)  # noqa: S311 - test data


def _short(value: object) -> str:
    text = repr(value)
    limit = 300
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def fork_and_wait(child: Callable[[], Awaitable[None]]) -> int:
    """Return the exit code of a forked process that runs the coroutine; a child that hangs is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forking a process with threads is risky is the point
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(_run(child))
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not run the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + _CHILD_SECONDS
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the forked child hung for {_CHILD_SECONDS} s")


async def _run(function: Callable[[], Awaitable[None]]) -> None:
    await function()
