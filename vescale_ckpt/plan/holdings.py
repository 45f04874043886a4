"""Holdings: what one rank says it holds, as a table of tensors and columns of boxes that cross between ranks.

The table (names, dtypes, shapes) is the same on most ranks, so it travels once for each distinct content; the boxes
travel as integers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vescale_ckpt.errors import FormatError
from vescale_storage.digest import digest, digest_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.state.tree import Path


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a rank says of a tensor, apart from where its boxes are."""

    path: Path
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    kind: str
    holding: str
    """A ``state.leaf.Holding`` value."""
    alias_of: Path | None = None
    abstains: bool = False
    """This rank holds no element, so it cannot see whether the tensor is tied, and leaves that to the others."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """One rank's tensors and the boxes of them that it holds."""

    specs: tuple[LeafSpec, ...]
    counts: npt.NDArray[np.int64]  # [num_specs] boxes held of each
    values: npt.NDArray[np.int64]  # flat: per box ndim offsets, then ndim sizes; by spec

    @classmethod
    def of(cls, leaves: Sequence[tuple[LeafSpec, Sequence[Box]]]) -> Holdings:
        """Return the holdings made of specs with their boxes."""
        flat: list[int] = []
        for _, boxes in leaves:
            for box in boxes:
                flat.extend(box.offset)
                flat.extend(box.shape)
        counts = np.array([len(boxes) for _, boxes in leaves], dtype=np.int64)
        return cls(tuple(spec for spec, _ in leaves), counts, np.array(flat, dtype=np.int64))

    def table_bytes(self) -> bytes:
        """Return the table part, equal on ranks that hold the same tensors."""
        rows = [
            [
                list(s.path),
                s.dtype,
                s.item_bytes,
                list(s.shape),
                s.kind,
                s.holding,
                s.alias_of and list(s.alias_of),
                s.abstains,
            ]
            for s in self.specs
        ]
        return json.dumps(rows, ensure_ascii=True, separators=(",", ":")).encode()

    def box_bytes(self) -> bytes:
        """Return the columns part."""
        return self.counts.astype("<i8").tobytes() + self.values.astype("<i8").tobytes()

    def key(self) -> bytes:
        """Return a digest of everything that a plan depends on, as far as this rank goes."""
        return digest_parts([digest(self.table_bytes()), digest(self.box_bytes())])


def decode_table(data: bytes) -> tuple[LeafSpec, ...]:
    """Return the specs of ``Holdings.table_bytes``."""
    return tuple(_spec(row) for row in json.loads(data))


def decode_boxes(data: bytes, num_specs: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (counts, values) of ``Holdings.box_bytes``.

    Raises:
        FormatError: the length is wrong.
    """
    column = np.frombuffer(data, dtype="<i8")
    if column.size < num_specs:
        raise FormatError(f"cannot plan: a rank sent {column.size} numbers for {num_specs} tensors")
    return column[:num_specs].astype(np.int64), column[num_specs:].astype(np.int64)


def _spec(row: list[Any]) -> LeafSpec:
    path, dtype, item_bytes, shape, kind, holding, alias_of, abstains = row
    alias = None if alias_of is None else tuple(alias_of)
    return LeafSpec(tuple(path), dtype, item_bytes, tuple(shape), kind, holding, alias, abstains)
