"""A back end that stands still at a chosen operation, so that others can be at work in between."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vescale_storage import loop
from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Callable


class Gate(WrapperBackend):
    """Passes on, but stands still before the n-th operation (of a verb and prefix) until it is opened.

    Args:
        inner: where operations go.
        at: number of the operation, from 0, among those that match.
        verb: which operations count; None means all.
        prefix: of the key.
    """

    def __init__(self, inner, at: int, *, verb: str | None = None, prefix: str = "") -> None:
        super().__init__(inner)
        self._at, self._verb, self._prefix = at, verb, prefix
        self._num_seen = 0
        self.reached = threading.Event()
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Let it go on."""

        async def set_it() -> None:
            self._opened.set()

        loop.run(set_it())

    async def _pass(self, verb: str, key: str) -> None:
        if self._verb not in {None, verb} or not key.startswith(self._prefix):
            return
        number = self._num_seen
        self._num_seen += 1
        if number == self._at:
            self.reached.set()
            await self._opened.wait()

    async def put(self, key, payload):
        await self._pass("put", key)
        await self.inner.put(key, payload)

    async def put_if_absent(self, key, payload):
        await self._pass("put_if_absent", key)
        await self.inner.put_if_absent(key, payload)

    async def get(self, key):
        await self._pass("get", key)
        return await self.inner.get(key)

    async def get_into(self, key, offset, out):
        await self._pass("get_into", key)
        await self.inner.get_into(key, offset, out)

    async def head(self, key):
        await self._pass("head", key)
        return await self.inner.head(key)

    async def list(self, prefix):
        await self._pass("list", prefix)
        async for info in self.inner.list(prefix):
            yield info

    async def delete(self, key):
        await self._pass("delete", key)
        await self.inner.delete(key)


class Standing:
    """Something that was begun on a thread of its own and may stand at a gate."""

    def __init__(self, gate: Gate, work: Callable[[], Any], deadline_seconds: float = 60.0) -> None:
        self.gate = gate
        self._deadline_seconds = deadline_seconds
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(work)
        self._future.add_done_callback(lambda _: gate.reached.set())
        assert gate.reached.wait(deadline_seconds), "it neither ends nor comes to the gate"

    @property
    def stands(self) -> bool:
        """Whether it is at the gate; otherwise it has ended without coming there."""
        return not self._future.done()

    def finish(self) -> Any:
        """Open the gate and return what the work returns."""
        self.gate.open()
        try:
            return self._future.result(self._deadline_seconds)
        finally:
            self._pool.shutdown()
