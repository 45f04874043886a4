"""A save's job: what the caller's thread hands to the background, and the parts that flow between them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vescale_ckpt.trace import Phases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_ckpt.saving.agree import Agreement
    from vescale_ckpt.saving.handle import SaveHandle
    from vescale_ckpt.stage.stager import Slab, StagedPart
    from vescale_ckpt.state.merge import PerRankEntries
    from vescale_ckpt.state.tree import Node


class PartQueue:
    """Staged parts in order, from one thread that stages to one that writes.

    With ``keep`` they stay until ``release``, so that a failed save can be written again; without it each is the
    writer's to release.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._parts: list[StagedPart] = []
        self._slabs: list[Slab] = []
        self._released = False
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, part: StagedPart) -> None:
        """Add a part."""
        if self._keep:
            part.hold()
        with self._changed:
            self._parts.append(part)
            if part.slab is not None and (not self._slabs or self._slabs[-1] is not part.slab):
                self._slabs.append(part.slab)
            released = self._released
            self._changed.notify()
        if released:
            self.release()

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more comes, or why."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify()

    def __iter__(self) -> Iterator[StagedPart]:
        """Yield every part, waiting for those to come; raise what staging raised."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: self._ended or len(self._parts) > at)  # type: ignore[misc]
                if self._error is not None:
                    raise self._error
                if at == len(self._parts):
                    return
                part = self._parts[at]
                if not self._keep:
                    self._parts[at] = None  # type: ignore[call-overload]
            if self._keep:
                part.hold()  # the writer releases what it is given; our own hold stays
            yield part
            at += 1

    def release(self) -> None:
        """Give back all memory, now that the save has ended; that of one that failed would not come back by itself."""
        with self._changed:
            slabs, self._slabs = self._slabs, []
            self._parts = []
            self._released = True
        for slab in slabs:
            slab.abandon()


@dataclass(slots=True)
class Job:
    """One save between the caller's thread and the background."""

    handle: SaveHandle
    agreement: Agreement
    tree: Node
    """Of this rank, per-rank values taken out."""
    per_rank: PerRankEntries
    bases: tuple[str, ...]
    metadata: dict[str, Any]
    compared: frozenset[int]
    """Tensors whose copies on several ranks are compared."""
    parts: PartQueue
    phases: Phases = field(default_factory=Phases)
    began: float = field(default_factory=time.monotonic)
    attempts: int = 0
    """How often it was begun again."""
