"""Bucket layout: which parameter stands where in which flat bucket; pure arithmetic over sizes.

Buckets are filled in the order in which gradients come, the last parameter first, so that a bucket is complete while
backward still runs. Each parameter starts at a multiple of ``ALIGNMENT`` and so does each rank's share of a bucket:
then a vectorised kernel cuts a share into the same vectors as it cuts the whole parameter, and gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vescale_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT: Final = 64
"""In elements: a multiple of every vector width, and of a cache line in each dtype."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket."""

    index: int
    """Of the parameter, as the caller counts them."""
    offset: int
    """Where its first element stands in the bucket."""
    numel: int

    @property
    def stop(self) -> int:
        """First element past it."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The slots of one bucket and its size, padding included."""

    slots: tuple[Slot, ...]
    numel: int

    def shard_numel(self, num_ranks: int) -> int:
        """Return how many elements each of ``num_ranks`` ranks holds of it."""
        return self.numel // num_ranks

    def held(self, slot: Slot, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return the (start, stop) of the elements of a parameter in the share of a rank; (0, 0) if there are none."""
        share = self.shard_numel(num_ranks)
        start = min(max(rank * share - slot.offset, 0), slot.numel)
        stop = min(max((rank + 1) * share - slot.offset, 0), slot.numel)
        return (start, stop) if start < stop else (0, 0)


def plan_buckets(numels: Sequence[int], *, bucket_size: int | None, num_ranks: int) -> tuple[BucketLayout, ...]:
    """Return the buckets of parameters of these sizes, the last parameter first.

    A bucket is closed by the parameter that brings it to ``bucket_size`` elements; None makes one bucket of all. Its
    size is a multiple of ``num_ranks * ALIGNMENT``.

    Raises:
        ConfigError: a bucket size or number of ranks below 1.
    """
    if (bucket_size is not None and bucket_size < 1) or num_ranks < 1:
        raise ConfigError(f"cannot plan buckets of {bucket_size} elements for {num_ranks} ranks: both must be positive")
    buckets: list[BucketLayout] = []
    slots: list[Slot] = []
    end = 0
    for index in reversed(range(len(numels))):
        slots.append(Slot(index, end, numels[index]))
        end = _round_up(end + numels[index], ALIGNMENT)
        if bucket_size is not None and end >= bucket_size:
            buckets.append(_close(slots, end, num_ranks))
            slots, end = [], 0
    if slots:
        buckets.append(_close(slots, end, num_ranks))
    return tuple(buckets)


def _close(slots: list[Slot], end: int, num_ranks: int) -> BucketLayout:
    return BucketLayout(tuple(slots), _round_up(max(end, 1), num_ranks * ALIGNMENT))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
