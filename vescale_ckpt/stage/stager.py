"""Staging: one contiguous copy of each part into slabs of reused host memory, after which the caller may go on.

Parts go to slabs one after another; a slab returns to its pool when the background has gathered all of its parts.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vescale_ckpt.errors import InternalError
from vescale_ckpt.stage.device import SideStream
from vescale_ckpt.stage.raw import aligned, as_integers, shaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vescale_ckpt.plan.parts import Part
    from vescale_ckpt.stage.memory import BufferPool
    from vescale_ckpt.state.leaf import TensorLeaf


@dataclass(slots=True)
class Slab:
    """A buffer that several parts share; given back when the last of them is released."""

    buffer: torch.Tensor
    give_back: Callable[[torch.Tensor], None]
    _users: int = 1  # the stager itself, while it still adds parts
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self) -> None:
        """Count one more user."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Count one user less."""
        with self._lock:
            last = self._users == 1
            self._users = max(0, self._users - 1)
        if last:
            self.give_back(self.buffer)

    def abandon(self) -> None:
        """Give the buffer back now, whoever counts as a user: nobody is one any more, though not all have said so."""
        with self._lock:
            used, self._users = self._users > 0, 0
        if used:
            self.give_back(self.buffer)


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part whose bytes stay as they are until it is released."""

    part: Part
    source: torch.Tensor
    """Shape ``part.box.shape``, as integers of the item's width; host memory, or the caller's own where it waits."""
    slab: Slab | None

    def hold(self) -> None:
        """Say that somebody more needs the bytes."""
        if self.slab is not None:
            self.slab.hold()

    def release(self) -> None:
        """Say that somebody needs the bytes no longer."""
        if self.slab is not None:
            self.slab.release()


class Stager:
    """Copies parts of leaves to host memory."""

    def __init__(self, pool: BufferPool, deadline_seconds: float, stream: SideStream | None = None) -> None:
        self._pool = pool
        self._deadline_seconds = deadline_seconds
        self._stream = stream or SideStream()

    def stage(
        self,
        parts: Iterable[Part],
        leaves: Sequence[TensorLeaf | None],
        hand_over: Callable[[StagedPart], None],
        *,
        in_place: bool,
        on_wait: Callable[[], None] | None = None,
    ) -> int:
        """Stage ``parts`` and hand each over as its slab is ready; return the bytes copied.

        Args:
            parts: what to stage; ``part.tensor`` indexes ``leaves``.
            leaves: by index in the plan's tensor table; None where this rank has none.
            hand_over: takes each staged part.
            in_place: host memory is handed over as it is: the caller promises to wait before it changes any.
            on_wait: called while waiting for memory; may raise to give up.
        """
        copied = 0
        slab: Slab | None = None
        start = 0
        ready: list[StagedPart] = []
        try:
            for part in parts:
                view = view_of(leaves[part.tensor], part)
                if in_place and view.device.type == "cpu":
                    hand_over(StagedPart(part, as_integers(view), None))
                    continue
                size = view.numel() * view.element_size()
                if slab is None or start + size > slab.buffer.numel():
                    self._finish(slab, ready, hand_over)
                    slab = None  # where the wait for the next one fails, this one must not be finished twice
                    slab, start = self._slab(size, on_wait), 0
                target = shaped(slab.buffer, start, view.dtype, part.box.shape)
                with self._stream.copying(view) as may_return_early:
                    target.copy_(as_integers(view), non_blocking=may_return_early)
                slab.hold()
                ready.append(StagedPart(part, target, slab))
                start = aligned(start + size)
                copied += size
        finally:
            self._finish(slab, ready, hand_over)
        return copied

    def _slab(self, size: int, on_wait: Callable[[], None] | None) -> Slab:
        if size > self._pool.buffer_bytes:  # a tile wider than a slab: memory of its own, not kept
            return Slab(torch.empty(size, dtype=torch.uint8), lambda _: None)
        return Slab(self._pool.take(self._deadline_seconds, on_wait), self._pool.give_back)

    def _finish(self, slab: Slab | None, ready: list[StagedPart], hand_over: Callable[[StagedPart], None]) -> None:
        """Wait for the copies into a slab and hand its parts over."""
        if slab is None:
            return
        self._stream.wait()
        for staged in ready:
            hand_over(staged)
        ready.clear()
        slab.release()


def view_of(leaf: TensorLeaf | None, part: Part) -> torch.Tensor:
    """Return this rank's memory of a part.

    Raises:
        InternalError: the plan asks for what this rank does not hold.
    """
    for piece in leaf.pieces if leaf is not None else ():
        if piece.box == part.box:  # nearly always: a small tensor whole, or a large one in one part
            return piece.view.detach()
        if piece.box.contains(part.box):
            inside = part.box.relative_to(piece.box)
            return piece.view.detach()[inside.slices] if inside.shape else piece.view.detach()
    raise InternalError(f"the plan asks this rank for {part}, which it does not hold")
