"""The columns that say where chunks are stored: the same in manifests and in fragments, under the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from vescale_ckpt.errors import CorruptionError, InternalError
from vescale_ckpt.format.document import Section
from vescale_ckpt.format.kinds import Kind
from vescale_storage.digest import DIGEST_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

    from vescale_ckpt.format.document import Document

CHUNK_COLUMNS: Final[dict[str, tuple[int, type[np.generic], int]]] = {
    "tile": (Kind.CHUNK_TILE, np.uint32, 1),
    "digest": (Kind.CHUNK_DIGEST, np.uint8, DIGEST_BYTES),
    "pack": (Kind.CHUNK_PACK, np.uint32, 1),
    "offset": (Kind.CHUNK_OFFSET, np.uint64, 1),
    "length": (Kind.CHUNK_LENGTH, np.uint32, 1),
    "codec": (Kind.CHUNK_CODEC, np.uint8, 1),
}
"""One item a chunk: field -> (section, item type, items)."""
PARTIAL_COLUMNS: Final[dict[str, tuple[int, type[np.generic], int]]] = {
    "partial_row": (Kind.PARTIAL_ROW, np.uint64, 1),
    "partial_box": (Kind.PARTIAL_BOX, np.uint64, 1),
}


class HasChunkColumns(Protocol):
    """A table of chunks: that of a manifest, or that of a fragment."""

    @property
    def tile(self) -> npt.NDArray[np.uint32]:
        """Tiles; as long as every other column."""


def check_columns(table: HasChunkColumns) -> None:
    """Refuse a table whose columns are not of the types and lengths that are written.

    Raises:
        InternalError: names the column; tables are made by this package alone.
    """
    num_chunks = len(table.tile)
    for name, (_, dtype, width) in (CHUNK_COLUMNS | PARTIAL_COLUMNS).items():
        column = getattr(table, name)
        shape = (num_chunks,) if name in CHUNK_COLUMNS else (len(column),)
        if column.dtype != np.dtype(dtype) or column.shape != (shape if width == 1 else (*shape, width)):
            raise InternalError(
                f"a table of {num_chunks} chunks has the column {name} of {column.dtype} {column.shape}"
            )


def encode_columns(table: HasChunkColumns) -> list[Section]:
    """Return the sections of a table that ``check_columns`` has passed."""
    return [Section(kind, getattr(table, name)) for name, (kind, _, _) in (CHUNK_COLUMNS | PARTIAL_COLUMNS).items()]


def decode_columns(document: Document) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a document by field name, views of its bytes.

    Raises:
        FormatError: a section is not there.
        CorruptionError: they have different lengths.
    """
    columns = {
        name: document.column(kind, dtype, width)
        for name, (kind, dtype, width) in (CHUNK_COLUMNS | PARTIAL_COLUMNS).items()
    }
    lengths = {name: len(columns[name]) for name in CHUNK_COLUMNS}
    if len(set(lengths.values())) > 1:
        raise CorruptionError(f"cannot use the {document.what}: its columns of chunks have the lengths {lengths}")
    return columns
