"""A back end that fails on command: the n-th operation dies, errs, lies, is slow, or loses its answer.

Every operation has a number, so a crash test is a loop: run once to count, then kill at 0, 1, 2, ... and look at what
is left. After a kill every operation fails, as it would for a process that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from vescale_storage.wrappers.wrapper import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from vescale_storage.backend import Backend, Leftover, ObjectInfo, Payload


class SimulatedCrash(Exception):  # noqa: N818 - it is no error of the code under test, but the end of its process
    """The process died here, as far as this back end can tell."""


class When(Enum):
    """On which side of the operation's effect the fault falls."""

    BEFORE = "before"
    """The operation did not happen."""
    AFTER = "after"
    """The operation happened, and its answer was lost."""


class Operation(NamedTuple):
    """One numbered call."""

    number: int
    verb: str
    key: str


@dataclass(kw_only=True)
class Rule:
    """What to do to operations of a verb and key prefix: skip the first ``skip``, then act on ``times`` of them."""

    verb: str | None = None
    """None matches every verb."""
    prefix: str = ""
    skip: int = 0
    times: int = 1
    error: Exception | None = None
    when: When = When.BEFORE
    delay_seconds: float = 0.0
    truncate_bytes: int = 0
    """A read returns so many bytes less, in silence."""
    flip_byte: int | None = None
    """A read returns this byte (counted modulo the length) with its bits inverted, in silence."""
    num_seen: int = field(default=0, init=False)
    num_hit: int = field(default=0, init=False)
    """How often it acted; a test asserts it, so that a rule that matches nothing is noticed."""

    def take(self, verb: str, key: str) -> bool:
        """Return whether it acts on this operation, and count it."""
        if self.verb not in {None, verb} or not key.startswith(self.prefix):
            return False
        self.num_seen += 1
        hit = self.skip < self.num_seen <= self.skip + self.times
        self.num_hit += hit
        return hit


class FaultBackend(WrapperBackend):
    """Passes on, except where a rule or ``kill_at`` says otherwise.

    Args:
        inner: holds what really happened; look at it after a crash.
        kill_at: number of the operation at which the process dies, or None.
        kill_when: whether that operation still takes effect.
    """

    def __init__(self, inner: Backend, *, kill_at: int | None = None, kill_when: When = When.BEFORE) -> None:
        super().__init__(inner)
        self.kill_at = kill_at
        self.kill_when = kill_when
        self.rules: list[Rule] = []
        self.operations: list[Operation] = []
        """What was asked, in order; its length is the number of the next operation."""
        self.dead = False

    # Scripting

    def add(self, rule: Rule) -> Rule:
        """Add a rule and return it."""
        self.rules.append(rule)
        return rule

    def fail(self, verb: str | None, error: Exception, *, prefix: str = "", skip: int = 0, times: int = 1) -> Rule:
        """Raise ``error`` instead of doing it."""
        return self.add(Rule(verb=verb, prefix=prefix, skip=skip, times=times, error=error))

    def lose_answer(
        self, verb: str | None, error: Exception, *, prefix: str = "", skip: int = 0, times: int = 1
    ) -> Rule:
        """Do it, then raise ``error``."""
        return self.add(Rule(verb=verb, prefix=prefix, skip=skip, times=times, error=error, when=When.AFTER))

    def delay(self, verb: str | None, seconds: float, *, prefix: str = "", skip: int = 0, times: int = 1) -> Rule:
        """Wait before doing it."""
        return self.add(Rule(verb=verb, prefix=prefix, skip=skip, times=times, delay_seconds=seconds))

    def truncate(
        self, verb: str | None, num_bytes: int = 1, *, prefix: str = "", skip: int = 0, times: int = 1
    ) -> Rule:
        """Let a read leave out its last bytes without an error."""
        return self.add(Rule(verb=verb, prefix=prefix, skip=skip, times=times, truncate_bytes=num_bytes))

    def corrupt(self, verb: str | None, byte: int = 0, *, prefix: str = "", skip: int = 0, times: int = 1) -> Rule:
        """Let a read return one byte inverted without an error."""
        return self.add(Rule(verb=verb, prefix=prefix, skip=skip, times=times, flip_byte=byte))

    # Verbs

    async def put(self, key: str, payload: Payload) -> None:
        """Pass on, or fail."""
        async with self._operation("put", key):
            await self.inner.put(key, payload)

    async def put_if_absent(self, key: str, payload: Payload) -> None:
        """Pass on, or fail."""
        async with self._operation("put_if_absent", key):
            await self.inner.put_if_absent(key, payload)

    async def get(self, key: str) -> bytes:
        """Pass on, fail, or lie."""
        async with self._operation("get", key) as rules:
            content = bytearray(await self.inner.get(key))
        for rule in rules:
            del content[max(0, len(content) - rule.truncate_bytes) :]
            _flip(memoryview(content), rule)
        return bytes(content)

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Pass on, fail, or lie."""
        async with self._operation("get_into", key) as rules:
            num_bytes = max(0, len(out) - max((rule.truncate_bytes for rule in rules), default=0))
            await self.inner.get_into(key, offset, out[:num_bytes])
        for rule in rules:
            _flip(out, rule)

    async def head(self, key: str) -> ObjectInfo:
        """Pass on, or fail."""
        async with self._operation("head", key):
            return await self.inner.head(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Pass on, or fail; a truncating rule leaves out so many of the last objects."""
        async with self._operation("list", prefix) as rules:
            found = [info async for info in self.inner.list(prefix)]
        for rule in rules:
            del found[max(0, len(found) - rule.truncate_bytes) :]
        for info in found:
            yield info

    async def delete(self, key: str) -> None:
        """Pass on, or fail."""
        async with self._operation("delete", key):
            await self.inner.delete(key)

    async def leftovers(self) -> Sequence[Leftover]:
        """Pass on, or fail."""
        async with self._operation("leftovers", ""):
            return await self.inner.leftovers()

    async def remove_leftover(self, leftover: Leftover) -> None:
        """Pass on, or fail."""
        async with self._operation("remove_leftover", leftover.key):
            await self.inner.remove_leftover(leftover)

    # Numbering and dying

    @contextlib.asynccontextmanager
    async def _operation(self, verb: str, key: str) -> AsyncIterator[Sequence[Rule]]:
        operation = Operation(len(self.operations), verb, key)
        with self._dying(operation):
            self.operations.append(operation)
            rules = [rule for rule in self.rules if rule.take(verb, key)]
            for rule in rules:
                if rule.delay_seconds:
                    await asyncio.sleep(rule.delay_seconds)
                if rule.error is not None and rule.when is When.BEFORE:
                    raise rule.error
            yield rules
            for rule in rules:
                if rule.error is not None and rule.when is When.AFTER:
                    raise rule.error

    @contextlib.contextmanager
    def _dying(self, operation: Operation) -> Iterator[None]:
        killed = operation.number == self.kill_at and not self.dead
        if self.dead or (killed and self.kill_when is When.BEFORE):
            self.dead = True
            raise SimulatedCrash(f"killed before {operation}" if killed else f"dead at {operation}")
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
            if not killed and not self.dead:
                raise
        # An operation that began before the death of another has no one left to hear its answer, either.
        if killed or self.dead:
            self.dead = True
            raise SimulatedCrash(f"killed after {operation}") from failure


def _flip(view: memoryview, rule: Rule) -> None:
    if rule.flip_byte is not None and len(view):
        view[rule.flip_byte % len(view)] ^= 0xFF
