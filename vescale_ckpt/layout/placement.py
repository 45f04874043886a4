"""Placements: what one mesh axis does to a tensor.

Plain values; whether they fit a tensor and a mesh is found by ``layout``. A ``dim`` counts the tensor's dims and may be
negative. What a placement *cuts* is the tensor, or the part of it that the placements before it have left to a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from vescale_ckpt.errors import LayoutError

if TYPE_CHECKING:
    from vescale_ckpt.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every position holds all of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A dim is cut into one range per position, as ``torch.chunk`` does: ``ceil(n / num)`` each, the last ones less."""

    dim: int
    sizes: tuple[int, ...] | None = None
    """Sizes of the ranges, where they are not those of ``torch.chunk``; they must add up to what is cut."""

    def __post_init__(self) -> None:
        if self.sizes is not None:
            _check_sizes(self.sizes, self)


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A dim is chunked into ``split_factor`` sections, each of which is sharded; a rank holds a shard of every section.

    It is torch's ``_StridedShard``, and what it means stands in ``Layout``: mostly not this, but the order of axes.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise LayoutError(f"{self}: the split factor must be at least 1")


@dataclass(frozen=True, slots=True)
class Interleaved:
    """A dim holds tensors one after another (fused QKV, SwiGLU), each of which is sharded by itself.

    The local tensor is the concatenation of the sections' shards: ``[W; V]`` is held as ``[W_t; V_t]``.
    """

    dim: int
    groups: tuple[int, ...]
    """Sizes of the sections in the whole tensor; they add up to its dim. Where an earlier axis has cut the dim already,
    what it left of each section is sharded."""

    def __post_init__(self) -> None:
        _check_sizes(self.groups, self)


@dataclass(frozen=True, slots=True)
class Flat:
    """Each position holds a range of what is cut, flattened in row-major order (ZeRO). The local tensor is 1-d."""

    ranges: tuple[tuple[int, int], ...]
    """(start, stop) per position, in elements, padding excluded; ``(0, 0)`` where a position holds nothing."""

    def __post_init__(self) -> None:
        if any(not 0 <= start <= stop for start, stop in self.ranges):
            raise LayoutError(f"{self}: a range must have 0 <= start <= stop")

    @classmethod
    def in_bucket(cls, offset: int, numel: int, shard_numel: int, num_shards: int) -> Flat:
        """Return how a tensor in a flat bucket is held where each position holds ``shard_numel`` of the bucket.

        Args:
            offset: where the tensor starts in the bucket.
            numel: how many elements it has.
            shard_numel: how many elements of the bucket, padding included, each position holds.
            num_shards: the number of positions.
        """

        def within(at: int) -> int:
            return min(max(at * shard_numel - offset, 0), numel)

        bounds = [(within(i), within(i + 1)) for i in range(num_shards)]
        return cls(tuple((a, b) if a < b else (0, 0) for a, b in bounds))


@dataclass(frozen=True, slots=True)
class Ragged:
    """The leading dims are flattened and cut in proportion to ``local_units`` (veScale's ``RaggedShard``).

    The local tensor has the flattened dims as its first dim, then the others.
    """

    dims: tuple[int, ...]
    """Must be ``(0, 1, ..., k - 1)``."""
    local_units: tuple[int, ...]
    """Relative share per position; the flattened dims must have a multiple of their sum."""

    def __post_init__(self) -> None:
        if not self.dims or self.dims != tuple(range(len(self.dims))):
            raise LayoutError(f"{self}: dims must be (0,), (0, 1), ...")
        _check_sizes(self.local_units, self)


@dataclass(frozen=True, slots=True)
class Boxes:
    """Each position holds a box of what is cut, said one by one."""

    boxes: tuple[Box, ...]
    """One per position, in the coordinates of what is cut."""


Placement: TypeAlias = Replicate | Shard | StridedShard | Interleaved | Flat | Ragged | Boxes


def num_positions(placement: Placement) -> int | None:
    """Return the size of the axis that a placement was written for, or None if it fits any."""
    match placement:
        case Shard(sizes=sizes) if sizes is not None:
            return len(sizes)
        case Flat(ranges=ranges):
            return len(ranges)
        case Ragged(local_units=units):
            return len(units)
        case Boxes(boxes=boxes):
            return len(boxes)
        case _:
            return None


def _check_sizes(sizes: tuple[int, ...], placement: Placement) -> None:
    if any(size < 0 for size in sizes):
        raise LayoutError(f"{placement}: a size is negative")
