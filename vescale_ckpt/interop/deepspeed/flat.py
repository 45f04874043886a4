"""Flat partitions: which elements of which parameter lie where in whose buffer. Pure.

Stages 1 and 2 lay the parameters of a group one after another, pad the whole, and give every rank an equal part. Stage
3 cuts every parameter by itself into equal parts, the last one padded, and lays a rank's parts one after another.
Padding is never part of a tensor.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a parameter's elements in one rank's flat buffer."""

    start: int
    """First element, of the flattened parameter."""
    stop: int
    rank: int
    offset: int
    """First element, of the rank's buffer."""


def segments_stage_2(
    shapes: Mapping[str, tuple[int, ...]], lengths: Sequence[int], what: str
) -> dict[str, list[Segment]]:
    """Return where the parameters of one group lie.

    Args:
        shapes: name -> shape, in the order of the buffer.
        lengths: elements of every rank's part.
        what: the group, for messages.

    Raises:
        CorruptionError: the parts together are shorter than the parameters.
    """
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    found: dict[str, list[Segment]] = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        found[name] = [
            Segment(max(lo, at) - at, min(hi, at + numel) - at, rank, max(lo, at) - lo)
            for rank, (lo, hi) in enumerate(itertools.pairwise(bounds))
            if max(lo, at) < min(hi, at + numel)
        ]
        at += numel
    if at > bounds[-1]:
        raise CorruptionError(f"cannot read {what}: its parameters have {at} elements, the ranks' parts {bounds[-1]}")
    return found


def segments_stage_3(
    shapes: Mapping[str, tuple[int, ...]], lengths: Sequence[int], what: str
) -> dict[str, list[Segment]]:
    """Return where all parameters lie; arguments and errors as for ``segments_stage_2``."""
    world_size = len(lengths)
    found: dict[str, list[Segment]] = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // world_size)
        found[name] = list(_cut(numel, part, world_size, at))
        at += part
    if at > min(lengths, default=0):
        raise CorruptionError(
            f"cannot read {what}: a rank's parts have {at} elements, its buffer {min(lengths, default=0)}"
        )
    return found


def _cut(numel: int, part: int, world_size: int, at: int) -> Iterator[Segment]:
    for rank in range(world_size):
        start, stop = min(rank * part, numel), min((rank + 1) * part, numel)
        if start < stop:
            yield Segment(start, stop, rank, at)
