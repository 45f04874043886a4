"""Fill a place with random numbers: only its own are drawn, a bounded number of words at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from vescale_train.rng.philox import WORDS_PER_BLOCK, Key, device_words, host_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from vescale_ckpt.geometry.box import Box
    from vescale_train.rng.place import Place

CHUNK_WORDS = 1 << 15
"""Drawn and made into numbers at a time: what it takes stays in a core's cache."""
CHUNK_WORDS_DEVICE = 1 << 22
GAP_WORDS = 1024
"""Skipping fewer words costs more than drawing them."""


def fill(place: Place, key: Key, numbers: Callable[[torch.Tensor], torch.Tensor], *, width: int = 1) -> None:
    """Write to every element of a place the number that its index in the whole tensor gives.

    Args:
        place: What to write to.
        key: Names the stream.
        numbers: Makes numbers of words (int64, 1-D; for ``width`` 2 of shape (n, 2)), each from its own words alone.
        width: Words an element takes; element ``i`` has words ``width i`` to ``width (i + 1)``.
    """
    for piece in place.pieces:
        memory = piece.memory
        if not memory.numel():
            continue
        flat = memory.view(-1) if memory.is_contiguous() else torch.empty_like(memory, memory_format=_ROWS).view(-1)
        at = 0
        for words in box_words(key, place.shape, piece.box, width, memory.device):
            made = numbers(words if width == 1 else words.view(-1, width))
            flat[at : at + len(made)].copy_(made)
            at += len(made)
        if not memory.is_contiguous():
            memory.copy_(flat.view(memory.shape))


def box_words(key: Key, shape: tuple[int, ...], box: Box, width: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the words of the elements of a box, in order, as int64 on a device; bounded parts of them."""
    starts, length = runs(shape, box)
    on_host = device.type == "cpu"
    limit = (CHUNK_WORDS if on_host else CHUNK_WORDS_DEVICE) // width
    make = _host if on_host else _device
    if length >= limit:
        for start in starts.tolist():
            for at in range(0, length, limit):
                first = np.array([(start + at) * width], dtype=np.int64)
                yield make(key, first, min(limit, length - at) * width, device)
        return
    rows = limit // length
    for at in range(0, len(starts), rows):
        yield make(key, starts[at : at + rows] * width, length * width, device)


def runs(shape: tuple[int, ...], box: Box) -> tuple[npt.NDArray[np.int64], int]:
    """Return where the contiguous runs of a box start in the flattened tensor, in order, and how long each is."""
    dim = len(shape)
    while dim and box.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    dim = max(dim - 1, 0)
    length = math.prod(box.shape[dim:])
    inner = math.prod(shape[dim:])
    first = box.offset[dim] * math.prod(shape[dim + 1 :]) if dim < len(shape) else 0
    starts = np.array([first], dtype=np.int64)
    for outer in range(dim - 1, -1, -1):
        indexes = np.arange(box.offset[outer], box.offset[outer] + box.shape[outer], dtype=np.int64)
        starts = (indexes[:, None] * inner + starts).reshape(-1)
        inner *= shape[outer]
    return starts, length


def _host(key: Key, starts: npt.NDArray[np.int64], length: int, device: torch.device) -> torch.Tensor:  # noqa: ARG001 -- as _device
    """Return the words of runs of one length; those with small gaps are drawn through."""
    if len(starts) == 1:
        return torch.from_numpy(host_words(key, int(starts[0]), length).astype(np.int64))
    first, last = int(starts[0]), int(starts[-1])
    if last + length - first <= len(starts) * (length + GAP_WORDS):
        drawn = host_words(key, first, last + length - first)
        words = drawn[(starts - first)[:, None] + np.arange(length)]
    else:
        words = np.stack([host_words(key, start, length) for start in starts.tolist()])
    return torch.from_numpy(words.reshape(-1).astype(np.int64))


def _device(key: Key, starts: npt.NDArray[np.int64], length: int, device: torch.device) -> torch.Tensor:
    """Return the words of runs of one length, each drawn in whole blocks."""
    first = torch.from_numpy(starts).to(device)[:, None]
    blocks = first // WORDS_PER_BLOCK + torch.arange(length // WORDS_PER_BLOCK + 2, device=device)
    words = device_words(key, blocks).flatten(1)
    return words.gather(1, first % WORDS_PER_BLOCK + torch.arange(length, device=device)).view(-1)


_ROWS = torch.contiguous_format
