"""Host buffers that are used again and again, within one budget.

Memory touched for the first time costs several times a copy (the kernel clears and maps it), so buffers are kept; they
are pinned when there is a device to copy from.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from vescale_ckpt.errors import StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


class BufferPool:
    """Equal buffers of host bytes, at most ``most`` of them (None: as many as are asked for); for any thread."""

    def __init__(self, buffer_bytes: int, most: int | None, *, pinned: bool = False) -> None:
        self.buffer_bytes = buffer_bytes
        self.most = most
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._num_made = 0
        self._num_out = 0
        self._peak_out = 0
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use at one time since ``reset_peak``."""
        return self._peak_out * self.buffer_bytes

    def reset_peak(self) -> None:
        """Start to count the peak anew."""
        with self._changed:
            self._peak_out = self._num_out

    def try_take(self) -> torch.Tensor | None:
        """Return a buffer (uint8, ``[buffer_bytes]``), or None where all are in use."""
        with self._changed:
            return self._take()

    def take(self, deadline_seconds: float, on_wait: Callable[[], None] | None = None) -> torch.Tensor:
        """Return a buffer, waiting until one is given back.

        Args:
            deadline_seconds: how long to wait at most.
            on_wait: called about ten times a second while waiting; may raise to give up.

        Raises:
            StorageTimeoutError: none came back in time.
        """
        waited = 0.0
        with self._changed:
            while (buffer := self._take()) is None:
                if waited >= deadline_seconds:
                    raise StorageTimeoutError(
                        f"no staging buffer came back within {deadline_seconds:g} s - all {self.most} of "
                        f"{self.buffer_bytes} bytes wait for storage - raise the host budget or look at the back end"
                    )
                if on_wait is not None:
                    on_wait()
                self._changed.wait(0.1)
                waited += 0.1
            return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        with self._changed:
            self._num_out -= 1
            self._free.append(buffer)
            self._changed.notify()

    def trim(self) -> None:
        """Free the buffers that are not in use."""
        with self._changed:
            self._num_made -= len(self._free)
            self._free.clear()

    def _take(self) -> torch.Tensor | None:
        if self._free:
            buffer = self._free.pop()
        elif self.most is None or self._num_made < self.most:
            buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._num_made += 1
        else:
            return None
        self._num_out += 1
        self._peak_out = max(self._peak_out, self._num_out)
        return buffer
