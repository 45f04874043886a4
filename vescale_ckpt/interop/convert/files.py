"""What a conversion writes, as data: files, each a sequence of parts that are made one after another.

A part is bounded in size and is made only when its turn comes. After an interruption the parts that are on disk are
not made again: they are read back, and whoever keeps account of the bytes (a checksum) sees them all the same.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from vescale_ckpt.interop.safetensors.bands import bands
from vescale_ckpt.stage.raw import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vescale_ckpt.geometry.box import Box
    from vescale_storage.backend import Buffer


def _ignore(_: Buffer) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a file."""

    make: Callable[[], Buffer]
    seen: Callable[[Buffer], None] = _ignore
    """Told the bytes, whether they were made or read back."""


class TargetFile(abc.ABC):
    """One file to write."""

    name: str
    """Relative to the target folder."""
    num_bytes: int

    @abc.abstractmethod
    def parts(self) -> Iterator[Part]:
        """Yield the parts in order. Every call begins anew and gives the same bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that a conversion writes."""

    files: Sequence[TargetFile]
    last: dict[str, bytes] = field(default_factory=dict)
    """Small files that make the others a checkpoint (an index, a table): name -> content. Published last."""
    carried: Sequence[str] = ()
    """Small files of the source that are copied as they are."""
    left_out: Sequence[tuple[str, str]] = ()
    """(name, why) of what the format cannot hold."""

    @property
    def num_bytes(self) -> int:
        """Of all files but the small ones."""
        return sum(file.num_bytes for file in self.files)


class Described(Protocol):
    """What a layout needs to know of a tensor."""

    @property
    def name(self) -> str:
        """Dotted name."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


class Readable(Protocol):
    """What a layout needs of the source."""

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor."""


def tensor_parts(source: Readable, tensor: Described, max_bytes: int) -> Iterator[Callable[[], Buffer]]:
    """Yield what makes the bytes of a tensor, row-major, little-endian, at most ``max_bytes`` at a time."""
    tile = tuple(max(1, size) for size in tensor.shape)
    for band in bands(tensor.shape, tile, tensor.dtype.itemsize, max_bytes):
        yield lambda band=band: _bytes_of(source.read(tensor.name, band))  # type: ignore[misc]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memory_of(tensor.contiguous().reshape(-1).view(torch.uint8))
