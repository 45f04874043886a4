"""The records of the format: what a manifest says, as frozen values and columns.

Chunk tables are columns (numpy, little-endian) and not objects, so that millions of chunks open in well under a second.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vescale_ckpt.errors import InternalError, InvalidInputError, NotFoundError
from vescale_ckpt.format.chunk_columns import check_columns
from vescale_ckpt.geometry.tiles import TileGrid
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.state.tree import Node, Path

FORMAT_VERSION: Final = (1, 0)
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

    @property
    def fqn(self) -> str:
        """The dotted name, for people."""
        return fqn(self.path)

    @property
    def is_one_tile(self) -> bool:
        """Whether it is too small to be cut."""
        return all(tile >= size for tile, size in zip(self.tile, self.shape, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
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
    partial_start: npt.NDArray[np.int64]  # [num_partial + 1] where each row's box starts in partial_box; not stored

    def __post_init__(self) -> None:
        check_columns(self)
        if self.first.dtype != np.uint64 or self.partial_start.dtype != np.int64:
            raise InternalError(f"first is of {self.first.dtype}, partial_start of {self.partial_start.dtype}")

    @classmethod
    def empty(cls, num_tensors: int) -> ChunkTable:
        """Return the table of tensors that have no chunks."""
        return cls(
            first=np.zeros(num_tensors + 1, np.uint64),
            tile=np.zeros(0, np.uint32),
            digest=np.zeros((0, 32), np.uint8),
            pack=np.zeros(0, np.uint32),
            offset=np.zeros(0, np.uint64),
            length=np.zeros(0, np.uint32),
            codec=np.zeros(0, np.uint8),
            partial_row=np.zeros(0, np.uint64),
            partial_box=np.zeros(0, np.uint64),
            partial_start=np.zeros(1, np.int64),
        )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.tile)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkTable):
            return NotImplemented
        names = [column.name for column in dataclasses.fields(self)]
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def rows(self, tensor: int) -> range:
        """Return the rows of a tensor, given by its index."""
        return range(int(self.first[tensor]), int(self.first[tensor + 1]))

    def partials_of(self, tensor: TensorRecord, rows: range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return which of some rows of a tensor are parts of tiles: ``int64[n]`` places in ``rows``, ascending.

        And their boxes, ``int64[n, 2 * ndim]``: offsets, then sizes, of the global tensor.
        """
        low, high = np.searchsorted(self.partial_row, np.array([rows.start, rows.stop], np.uint64))
        places = self.partial_row[low:high].astype(np.int64) - rows.start
        boxes = self.partial_box[int(self.partial_start[low]) : int(self.partial_start[high])]
        return places, boxes.astype(np.int64).reshape(len(places), 2 * len(tensor.shape))

    def boxes_of(self, tensor: TensorRecord, rows: range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (offsets, sizes), each ``int64[len(rows), ndim]``, of the boxes that rows of a tensor hold.

        Raises:
            LayoutError: the rows are not all of this tensor.
        """
        offsets, sizes = TileGrid(tensor.shape, tensor.tile).boxes(self.tile[rows.start : rows.stop])
        places, boxes = self.partials_of(tensor, rows)
        if len(places):
            offsets[places], sizes[places] = np.split(boxes, 2, axis=1)
        return offsets, sizes

    def raw_bytes(self, tensor: TensorRecord, rows: range, item_bytes: int) -> npt.NDArray[np.int64]:
        """Return how many bytes each chunk of some rows of a tensor has once decoded, ``int64[len(rows)]``."""
        volumes: npt.NDArray[np.int64] = self.boxes_of(tensor, rows)[1].prod(axis=1, dtype=np.int64)
        return volumes * item_bytes


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
    _by_path: dict[Path, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_fqn: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    __hash__ = None  # type: ignore[assignment]

    @property
    def by_path(self) -> dict[Path, int]:
        """Index in ``tensors`` by path; made on first use, not to be changed."""
        if len(self._by_path) != len(self.tensors):
            self._by_path.update({tensor.path: index for index, tensor in enumerate(self.tensors)})
        return self._by_path

    @property
    def by_fqn(self) -> dict[str, tuple[int, ...]]:
        """Indexes in ``tensors`` by dotted name, mostly one for each; made on first use, not to be changed."""
        if not self._by_fqn:
            indexes: dict[str, list[int]] = {}
            for index, tensor in enumerate(self.tensors):
                indexes.setdefault(tensor.fqn, []).append(index)
            self._by_fqn.update({name: tuple(found) for name, found in indexes.items()})
        return self._by_fqn

    def find(self, what: Path | str) -> int:
        """Return the index in ``tensors`` of a path, or of a dotted name.

        Raises:
            NotFoundError: there is none.
            InvalidInputError: several tensors have this dotted name; lists their paths.
        """
        found = self.by_fqn.get(what, ()) if isinstance(what, str) else _as_tuple(self.by_path.get(what))
        if not found:
            name = what if isinstance(what, str) else fqn(what)
            raise NotFoundError(
                f"cannot find a tensor {what!r} in {self.run}@{self.step}: it has {len(self.tensors)} others"
                f"{_suggest(name, list(self.by_fqn))}",
                fqn=name,
            )
        if len(found) > 1:
            paths = " and ".join(repr(self.tensors[index].path) for index in found)
            raise InvalidInputError(f"the name {what!r} could be any of {paths}: pass the path, as a tuple", fqn=what)
        return found[0]

    def resolve(self, tensor: int) -> int:
        """Return the index of the tensor that has a tensor's chunks: its own, unless it is an alias."""
        alias_of = self.tensors[tensor].alias_of
        return tensor if alias_of is None else alias_of


def _as_tuple(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


def _suggest(name: str, names: Sequence[str]) -> str:
    """Return names that end alike, for a message."""
    last = name.rsplit(".", 1)[-1]
    alike = [other for other in names if other.rsplit(".", 1)[-1] == last][:5]
    return f", among them {', '.join(map(repr, alike))}" if alike else ""
