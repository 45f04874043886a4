"""The records of the format: what a manifest says, as frozen values and columns.

Chunk tables are columns (numpy, little-endian) and not objects, so that millions of chunks open in well under a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vescale_ckpt.state.tree import Node, Path

FORMAT_VERSION = (1, 0)
"""(major, minor): a reader refuses a higher major and ignores what a higher minor adds."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One stored array."""

    path: Path
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``, ``float8_e4m3fn``, ..."""
    shape: tuple[int, ...]
    """Global shape: stated, never derived from what was written."""
    tile: tuple[int, ...]
    """Tile sizes per dim, see ``geometry.tiles``."""
    kind: str = "tensor"
    """A ``LeafKind`` value."""
    alias_of: int | None = None
    """Index of the record whose bytes this one shares; an alias has no chunks."""


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Columns, one row a chunk; the rows of tensor ``i`` are ``first[i]:first[i + 1]``, by tile.

    A chunk is a whole tile, unless its row is in ``partial_row``: then it is the box, inside that tile, that stands in
    ``partial_box`` at the same place.
    """

    first: npt.NDArray[np.uint64]  # [num_tensors + 1]
    tile: npt.NDArray[np.uint32]  # [num_chunks] row-major index in the tensor's tile grid
    digest: npt.NDArray[np.uint8]  # [num_chunks, 32] BLAKE3 of the raw bytes
    pack: npt.NDArray[np.uint32]  # [num_chunks] index into the pack table
    offset: npt.NDArray[np.uint64]  # [num_chunks] of the stored bytes in the pack
    length: npt.NDArray[np.uint32]  # [num_chunks] of the stored bytes
    codec: npt.NDArray[np.uint8]  # [num_chunks] a vescale_storage.pack.Codec
    partial_row: npt.NDArray[np.uint64]  # [num_partial] ascending
    partial_box: npt.NDArray[np.uint64]  # flat: per partial row ndim offsets, then ndim sizes, of the global tensor


@dataclass(frozen=True, slots=True)
class PackRecord:
    """One pack that the snapshot's chunks live in."""

    name: str
    """64 hex digits: BLAKE3 of the pack's footer."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a snapshot is."""

    run: str
    step: int
    created_seconds: float
    """Seconds since the epoch."""
    transaction: str
    """32 hex digits; the id of the save that wrote it."""
    world_size: int
    tree: Node
    tensors: tuple[TensorRecord, ...]
    chunks: ChunkTable
    packs: tuple[PackRecord, ...]
    writer: str = ""
    """Name and version of what wrote it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The user's own JSON values."""
    version: tuple[int, int] = FORMAT_VERSION
