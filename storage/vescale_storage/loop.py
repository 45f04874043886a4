"""The event loop thread: the only place where blocking code meets coroutines.

One daemon thread a process runs one asyncio loop on which every back end lives, whoever calls. It starts with the first
call, is replaced in a forked child, and ends with the interpreter. Blocking work (files, hashing) runs on daemon
threads of its own pool, so that a stuck file system cannot keep the interpreter from ending.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from vescale_storage.errors import StateError
from vescale_storage.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
P = ParamSpec("P")

MAX_WORKERS: Final = 32
"""Threads for blocking work: they mostly wait for disks, so more than there are cores."""
_CANCEL_GRACE_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 2.0


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on the loop thread, wait for it, and return its result.

    Any thread but the loop's own may call this. An exception that interrupts the wait (Ctrl-C) cancels the coroutine,
    gives it a few seconds to put down the caller's buffers, and goes on.

    Raises:
        StateError: called on the loop thread, where waiting would be a deadlock, or the interpreter is ending.
    """
    if _state.is_loop_thread():
        coro.close()
        raise StateError("cannot wait for a coroutine on the storage event loop itself: await it, or use submit()")
    future = _submit(coro)
    try:
        return future.result()
    except BaseException:
        if not future.ended.is_set():
            future.cancel()
            future.ended.wait(_CANCEL_GRACE_SECONDS)
        raise
    finally:
        del future  # else an error's traceback, this frame and the future keep each other, and the buffers, alive


def submit(coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start the coroutine on the loop thread and return its future; cancelling the future cancels the coroutine.

    In a process forked later the future raises StateError, as its result would never come.

    Raises:
        StateError: the interpreter is ending.
    """
    return _submit(coro)


async def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function on a pool thread and return its result.

    A cancelled caller waits until the function has ended: while it runs, it may still be reading or filling the
    caller's buffers. Where the function touches no memory of the caller, ``run_abandonable`` gives up at once.
    """
    _register_process_hooks()
    call = _state.workers.submit(function, *args, **kwargs)
    future = asyncio.wrap_future(call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not call.cancel():  # one that still waits for a thread is dropped; one that has begun cannot be stopped
            await _wait_through_cancellation(future)
        raise


async def run_abandonable(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function on a pool thread and return its result; a cancelled caller leaves it behind.

    Only for functions that touch no buffer of the caller and whose late effects do no harm: they run on after that.
    """
    _register_process_hooks()
    return await asyncio.wrap_future(_state.workers.submit(function, *args, **kwargs))


async def _wait_through_cancellation(future: asyncio.Future[T]) -> None:
    future.add_done_callback(_retrieve)
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue


def _retrieve(future: asyncio.Future[T]) -> None:
    # The caller is gone; looking at the error keeps asyncio from reporting it as forgotten.
    if not future.cancelled():
        future.exception()


class _LoopFuture(concurrent.futures.Future[T]):
    """A future that knows its process and when its coroutine has really ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        """Set once the coroutine runs no more; a cancelled future is done before that."""
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> T:
        self._refuse_other_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse_other_process()
        return super().exception(timeout)

    def _refuse_other_process(self) -> None:
        if self._pid != os.getpid():
            raise StateError(
                f"cannot wait in process {os.getpid()} for work that its parent {self._pid} began before the fork: "
                "finish saves before forking, or start them in the child"
            )


class _State:
    """The loop and threads of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.workers = Workers(MAX_WORKERS, name="vescale-storage-worker")
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None

    def is_loop_thread(self) -> bool:
        return self.thread is threading.current_thread()

    def running_loop(self) -> asyncio.AbstractEventLoop:
        _register_process_hooks()
        with self.lock:
            if self.loop is None:
                self._start()
            assert self.loop is not None  # noqa: S101 - narrows the type
            return self.loop

    def _start(self) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve_loop, args=(loop,), name="vescale-storage-loop", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            loop.close()
            raise StateError(f"cannot start the storage event loop: {error}") from error
        self.loop, self.thread = loop, thread

    def close(self) -> None:
        with self.lock:
            loop, thread = self.loop, self.thread
            self.loop = self.thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_SECONDS)


def _serve_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    while not stopped:
        # A task that raises KeyboardInterrupt or SystemExit throws it out of the loop as well as into its future;
        # the other tasks have nothing to do with it.
        try:
            loop.run_forever()
            stopped = True
        except (KeyboardInterrupt, SystemExit):
            continue
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_SECONDS / 2))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


_state = _State()
_left_in_parent: list[_State] = []
_hooks_registered = False


def _register_process_hooks() -> None:
    """Register what to do at a fork and at the end; called before any lock is taken that a fork could find held.

    There is no lock around it for the same reason: registered twice, the hooks do no harm.
    """
    global _hooks_registered  # noqa: PLW0603 - one registration a process
    if not _hooks_registered:
        os.register_at_fork(after_in_child=_forget_parent)
        atexit.register(_close_at_exit)
        _hooks_registered = True


def _forget_parent() -> None:
    # Threads do not survive a fork and locks may be held by them: the child starts afresh. The parent's loop is kept
    # alive, never closed: closing it here would unregister the parent's own wake-up pipe from the epoll they share.
    global _state  # noqa: PLW0603 - one state a process is what this module is for
    _left_in_parent.append(_state)
    _state = _State()


def _close_at_exit() -> None:
    _state.close()


def _submit(coro: Coroutine[Any, Any, T]) -> _LoopFuture[T]:
    future: _LoopFuture[T] = _LoopFuture()
    try:
        loop = _state.running_loop()
        loop.call_soon_threadsafe(_begin, loop, coro, future)
    except RuntimeError as error:
        coro.close()
        if isinstance(error, StateError):
            raise
        raise StateError("cannot run a coroutine: the storage event loop has ended with the interpreter") from error
    return future


def _begin(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T], future: _LoopFuture[T]) -> None:
    if future.cancelled():
        coro.close()
        future.set_running_or_notify_cancel()  # else concurrent.futures.wait would never see that it is done
        future.ended.set()
        return
    task = loop.create_task(coro)
    task.add_done_callback(functools.partial(_finish, future))
    future.add_done_callback(functools.partial(_cancel_task, loop, task))


def _finish(future: _LoopFuture[T], task: asyncio.Task[T]) -> None:
    try:
        if task.cancelled():
            future.cancel()
        error = None if task.cancelled() else task.exception()
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())
    finally:
        future.ended.set()


def _cancel_task(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
    if future.cancelled() and not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
