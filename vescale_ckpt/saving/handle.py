"""The handle of a save: how far it is, and what it came to."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import InternalError, StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


class SaveState(enum.IntEnum):
    """How far a save is; each state includes those before it, but for FAILED."""

    STAGING = 0
    STAGED = 1
    """The caller may change its tensors."""
    DURABLE = 2
    """This rank's bytes are in storage."""
    COMMITTED = 3
    """The snapshot is visible, whole, to everybody."""
    FAILED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """What a save did. Bytes and counts are of this rank."""

    run: str
    step: int
    version: int
    """1 for the first save of a step."""
    bytes_total: int
    """What this rank was to write."""
    bytes_deduplicated: int
    """Of these, found in storage already."""
    bytes_written: int
    """Put to storage by this rank, pack footers included."""
    chunks: int
    packs: int
    """New packs."""
    attempts: int
    """1 where the first went well."""
    imbalance: float
    """Most bytes of any rank over the mean."""
    peak_host_bytes: int
    """Most memory in use for staging and writing."""
    seconds: dict[str, float]
    """By phase: plan, stage, write, commit; and total."""


class SaveHandle:
    """A save under way. Safe to wait on from any thread."""

    def __init__(self, run: str, step: int) -> None:
        self.run = run
        self.step = step
        self._changed = threading.Condition()
        self._state = SaveState.STAGING
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._observed = False

    @property
    def state(self) -> SaveState:
        """How far the save is."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._state >= SaveState.COMMITTED

    @property
    def forgotten(self) -> bool:
        """Whether the save failed and nobody has seen it."""
        return self._state is SaveState.FAILED and not self._observed

    def wait_staged(self, timeout_seconds: float | None = None) -> None:
        """Wait until the caller may change its tensors.

        Raises:
            StorageTimeoutError: not within the time.
            VeScaleError: the save failed.
        """
        self._wait(lambda: self._state is not SaveState.STAGING, timeout_seconds, "staged")
        if self._state is SaveState.FAILED:
            self.result()

    def wait_copied(self) -> None:
        """Wait until the caller may change its tensors, whatever becomes of the save; never raises."""
        self._wait(lambda: self._state is not SaveState.STAGING, None, "staged")

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Wait until the snapshot is committed and return what it took.

        Raises:
            StorageTimeoutError: not within the time; the save goes on.
            VeScaleError: why the save failed.
        """
        error = self.outcome(timeout_seconds)
        if error is not None:
            raise error
        if self._report is None:
            raise InternalError(f"the save of {self.run}@{self.step} ended without a report")
        return self._report

    def outcome(self, timeout_seconds: float | None = None) -> BaseException | None:
        """Wait until the save has ended and return why it failed, or None.

        Raises:
            StorageTimeoutError: not within the time; the save goes on.
        """
        self.wait_done(timeout_seconds)
        self._observed = True
        return self._error

    def wait_done(self, timeout_seconds: float | None = None) -> None:
        """Wait until the save has ended, without taking notice of how.

        Raises:
            StorageTimeoutError: not within the time; the save goes on.
        """
        self._wait(lambda: self.done, timeout_seconds, "ended")

    def advance(self, state: SaveState) -> None:
        """Move forward to a state; for the saver alone. An earlier or equal state changes nothing."""
        with self._changed:
            if state > self._state:
                self._state = state
                self._changed.notify_all()

    def end(self, outcome: SaveReport | BaseException) -> None:
        """Set the outcome; for the saver alone."""
        with self._changed:
            if isinstance(outcome, BaseException):
                self._error, self._state = outcome, SaveState.FAILED
            else:
                self._report, self._state = outcome, SaveState.COMMITTED
            self._changed.notify_all()

    def _wait(self, reached: Callable[[], bool], timeout_seconds: float | None, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, timeout_seconds):
                raise StorageTimeoutError(
                    f"the save of {self.run}@{self.step} was not {what} within {timeout_seconds:g} s: "
                    f"it is {self._state.name.lower()}"
                )
