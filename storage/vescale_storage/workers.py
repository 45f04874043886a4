"""Threads for blocking work, all daemons: one that hangs in a dead mount does not keep the interpreter from ending."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from vescale_storage.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")

_Call: TypeAlias = "tuple[concurrent.futures.Future[Any], Callable[[], Any]]"


class Workers(concurrent.futures.Executor):
    """A pool of daemon threads, made one by one as calls find no idle thread. A forked child needs one of its own."""

    def __init__(self, max_workers: int, *, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._num_threads = 0
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Call ``fn(...)`` on a thread and return its future.

        Raises:
            StateError: there is no thread, and none can be started.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        # Put before looking for an idle thread: one that starts up in between would count itself idle, then take the
        # call and still be counted, and the next call would wait for nobody.
        self._calls.put((future, functools.partial(fn, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and not self._add_thread():
            future.cancel()
            raise StateError(
                "cannot start a thread for blocking work: the interpreter is ending, or the process may not"
            )
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Let the threads end once they have served what was submitted; nothing may be submitted afterwards.

        Never waits: a thread that hangs would not come.
        """
        del wait, cancel_futures
        with self._lock:
            for _ in range(self._num_threads):
                self._calls.put(None)

    def _add_thread(self) -> bool:
        """Return whether there is any thread to serve calls."""
        with self._lock:
            if self._num_threads < self._max_workers:
                with contextlib.suppress(RuntimeError):  # then those that there are will serve the call
                    name = f"{self._name}-{self._num_threads}"
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
                    self._num_threads += 1
            return self._num_threads > 0

    def _serve(self) -> None:
        while True:
            try:
                taken = self._calls.get_nowait()
            except queue.Empty:
                self._idle.release()
                taken = self._calls.get()
            if taken is None:
                return
            future, call = taken
            if future.set_running_or_notify_cancel():
                _settle(future, call)
            del future, call, taken  # an idle thread keeps no buffer alive


def _settle(future: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except StopIteration as error:
        # asyncio cannot carry it: the awaiting task would never wake.
        wrapped = RuntimeError("blocking work raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    except BaseException as error:  # noqa: BLE001 - a thread hands every error to its future
        future.set_exception(error)
    else:
        future.set_result(result)
