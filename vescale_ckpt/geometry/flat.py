"""Ranges of a row-major flattened tensor as boxes, and boxes as ranges.

Flat buckets (ZeRO, FSDP's first generation) cut parameters at any element; the store speaks in boxes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box

if TYPE_CHECKING:
    import numpy.typing as npt


def flat_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the fewest boxes that hold the elements ``start <= flat index < stop``, in the order of the elements.

    Each box is itself one contiguous flat range, so the boxes' volumes say where each one starts in the range. There
    are at most ``2 * ndim - 1`` of them (1 for a 0-d tensor).

    Raises:
        LayoutError: if the range does not lie in the tensor.
    """
    volume = math.prod(shape)
    if not 0 <= start <= stop <= volume:
        raise LayoutError(f"flat range {start}:{stop} does not lie in shape {shape} of {volume} elements")
    return _flat_to_boxes(shape, start, stop, ()) if start < stop else []


def _flat_to_boxes(shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...]) -> list[Box]:
    """Decompose a range that is not empty, of the sub-tensor at the indexes ``prefix`` of the leading dims."""
    ones = (1,) * len(prefix)
    if not shape:
        return [Box(prefix, ones)]
    rest = shape[1:]
    row = math.prod(rest)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _flat_to_boxes(rest, head, tail, (*prefix, first))
    boxes: list[Box] = []
    if head:
        boxes += _flat_to_boxes(rest, head, row, (*prefix, first))
        first += 1
    if first < last:
        boxes.append(Box((*prefix, first, *(0,) * len(rest)), (*ones, last - first, *rest)))
    if tail:
        boxes += _flat_to_boxes(rest, 0, tail, (*prefix, last))
    return boxes


def box_to_flat_ranges(shape: tuple[int, ...], box: Box) -> npt.NDArray[np.int64]:
    """Return the longest contiguous flat ranges of a box's elements: rows (start, stop), ascending, ``int64[n, 2]``.

    Raises:
        LayoutError: if the box does not lie in the tensor.
    """
    if box.ndim != len(shape) or any(e > n for e, n in zip(box.end, shape, strict=True)):
        raise LayoutError(f"{box} does not lie in a tensor of shape {shape}")
    if box.volume == 0:
        return np.empty((0, 2), np.int64)
    # Everything right of the last dim that the box does not span is contiguous, and so is the box along that dim.
    inner = len(shape)
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    run = math.prod(box.shape[max(inner - 1, 0) :])
    starts = np.zeros(1, np.int64)
    for d in range(inner):
        num_steps = box.shape[d] if d < inner - 1 else 1
        along = (box.offset[d] + np.arange(num_steps, dtype=np.int64)) * math.prod(shape[d + 1 :])
        starts = (starts[:, None] + along[None, :]).reshape(-1)
    return np.stack([starts, starts + run], axis=1)
