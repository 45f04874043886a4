"""Payloads cut without copying: what back ends and wrappers do to buffers that belong to the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_storage.backend import Payload

MAX_BUFFERS: Final = 1024
"""Linux takes no more buffers in one ``writev``."""


def payload_bytes(payload: Payload) -> int:
    """Return how many bytes the buffers hold together."""
    return sum(len(buffer) for buffer in payload)


def cut(payload: Payload, batch_bytes: int, *, max_buffers: int = MAX_BUFFERS) -> Iterator[list[memoryview]]:
    """Yield the payload, in order, as batches of at most ``batch_bytes`` and ``max_buffers`` views, without copying.

    No view and no batch is empty; an empty payload has no batch.
    """
    batch: list[memoryview] = []
    room_bytes = batch_bytes
    for buffer in payload:
        view = memoryview(buffer)
        while view:
            batch.append(view[:room_bytes])
            view = view[len(batch[-1]) :]
            room_bytes -= len(batch[-1])
            if room_bytes == 0 or len(batch) == max_buffers:
                yield batch
                batch, room_bytes = [], batch_bytes
    if batch:
        yield batch


def cut_exactly(payload: Payload, part_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the payload, in order, as parts of exactly ``part_bytes``, the last of what is left; nothing is copied."""
    num_buffers = sum(1 for _ in payload)
    # A part of p bytes touches at most every buffer once, so this bound never ends a part early.
    return cut(payload, part_bytes, max_buffers=num_buffers + 1)
