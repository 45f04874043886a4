"""What must hold between the tables of a manifest, all of it checked column by column.

A reader indexes one table by another after this and never asks again; so a damaged or hostile manifest is refused here
or nowhere. That chunks cover their tensors exactly once is asked where it matters, at commit and at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from vescale_ckpt.errors import CorruptionError, InternalError
from vescale_ckpt.state.tree import tensor_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.records import ChunkTable, TensorRecord
    from vescale_ckpt.state.tree import Node, Path

    Int64s = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]
    Uint64s = npt.NDArray[np.uint64]

MAX_NDIM: Final = 64
"""Dims of a tensor, as torch has it."""
MAX_TILES: Final = 2**32
MAX_ELEMENTS: Final = 2**62
"""Of one tensor: no byte count of a tensor that exists comes near, and sums of them fit in 64 bits."""
_MAX_INT64: Final = 2**63 - 1
KNOWN_CODECS: Final = (0, 1)
"""Values of ``vescale_storage.pack.Codec`` that version 1 of the format has."""


@dataclass(frozen=True, slots=True)
class TensorShapes:
    """Shapes and tiles of many tensors as columns; those of tensor ``i`` are ``start[i]:start[i + 1]``."""

    ndim: npt.NDArray[np.int64]  # [num_tensors]
    start: npt.NDArray[np.int64]  # [num_tensors + 1]
    shape: npt.NDArray[np.int64]  # flat
    tile: npt.NDArray[np.int64]  # flat
    num_tiles: npt.NDArray[np.int64]  # [num_tensors]; 0 for an alias, which has no chunks

    @classmethod
    def of(cls, tensors: Sequence[TensorRecord], what: str = "plan") -> TensorShapes:
        """Return the columns of some records.

        Raises:
            CorruptionError: names the first whose tiles do not fit its shape, or that is too large.
        """
        ndim = [len(tensor.shape) for tensor in tensors]
        if ndim != [len(tensor.tile) for tensor in tensors]:
            raise CorruptionError(f"cannot use the {what}: a tensor's tiles have other dims than its shape")
        sizes = [size for tensor in tensors for size in tensor.shape]
        edges = [edge for tensor in tensors for edge in tensor.tile]
        if max([*sizes, *edges], default=0) > _MAX_INT64:
            raise CorruptionError(f"cannot use the {what}: a tensor has a dim of 2^63 or more")
        aliases = [index for index, tensor in enumerate(tensors) if tensor.alias_of is not None]
        return cls.of_columns(
            np.array(ndim, np.int64), np.array(sizes, np.int64), np.array(edges, np.int64), aliases=aliases, what=what
        )

    @classmethod
    def of_columns(
        cls,
        ndim: Int64s,
        shape: Int64s,
        tile: Int64s,
        *,
        aliases: Sequence[int],
        what: str,
    ) -> TensorShapes:
        """Return the same of columns; ``aliases`` are the tensors that are aliases.

        Raises:
            CorruptionError: as ``of``.
        """
        start = np.concatenate([np.zeros(1, np.int64), np.cumsum(ndim)])
        of = np.repeat(np.arange(len(ndim)), ndim)
        refuse_tensors(ndim > MAX_NDIM, what, f"more than {MAX_NDIM} dims")
        bad = np.zeros(len(ndim), np.bool_)
        bad[of[(shape < 0) | (tile < 1) | (tile > np.maximum(shape, 1))]] = True
        refuse_tensors(bad, what, "tiles that do not fit its shape")
        num_tiles, elements = np.ones(len(ndim), np.int64), np.ones(len(ndim))
        too_many = np.zeros(len(ndim), np.bool_)
        # empty tensors first become zero, so that no other dim of theirs can overflow
        num_tiles[of[shape == 0]] = elements[of[shape == 0]] = 0
        for dim in range(int(ndim.max(initial=0))):
            at = np.flatnonzero(ndim > dim)
            size, edge = shape[start[at] + dim], tile[start[at] + dim]
            counts = -(-size // edge)
            too_many[at] |= num_tiles[at] > MAX_TILES // np.maximum(counts, 1)
            num_tiles[at] *= np.where(too_many[at], 0, counts)
            with np.errstate(over="ignore"):  # infinity is too large all the same
                elements[at] *= size
        refuse_tensors(too_many, what, f"more than {MAX_TILES} tiles")
        refuse_tensors(elements >= MAX_ELEMENTS, what, f"more than {MAX_ELEMENTS} elements")
        num_tiles[list(aliases)] = 0
        return cls(ndim, start, shape, tile, num_tiles)


def check_tensors(tensors: Sequence[TensorRecord], what: str) -> None:
    """Refuse records that contradict one another; shapes and tiles are the matter of ``TensorShapes``.

    Raises:
        CorruptionError: names the first that does.
    """
    first: dict[Path, int] = {}
    for index, tensor in enumerate(tensors):
        problem = ""
        if tensor.alias_of is not None:
            problem = _alias_problem(tensor, index, tensors)
        if first.setdefault(tensor.path, index) != index:
            problem = f"tensor {first[tensor.path]} has the same path"
        if problem:
            raise CorruptionError(f"cannot use the {what}: tensor {index}, {tensor.fqn[:200]!r}: {problem}")


def _alias_problem(tensor: TensorRecord, index: int, tensors: Sequence[TensorRecord]) -> str:
    if tensor.alias_of is None or not 0 <= tensor.alias_of < index:
        return f"it is an alias of tensor {tensor.alias_of}, which does not come before it"
    origin = tensors[tensor.alias_of]
    if origin.alias_of is not None:
        return f"it is an alias of tensor {tensor.alias_of}, which is an alias itself"
    if (origin.dtype, origin.shape) != (tensor.dtype, tensor.shape):
        return f"{tensor.dtype} {tensor.shape} is an alias of {origin.dtype} {origin.shape}"
    return ""


def check_tree(tree: Node, tensors: Sequence[TensorRecord], what: str) -> None:
    """Refuse a tree whose places of tensors are not exactly the paths of the records.

    Raises:
        CorruptionError: names one that has no counterpart.
    """
    places = tensor_paths(tree)
    if places == [tensor.path for tensor in tensors]:  # mostly in the same order too
        return
    in_tree, in_table = set(places), {tensor.path for tensor in tensors}
    if in_tree == in_table:
        return
    lacks_record, lacks_place = next(iter(in_tree - in_table), None), next(iter(in_table - in_tree), None)
    raise CorruptionError(
        f"cannot use the {what}: its tree and its tensors differ; "
        + (f"no tensor for {lacks_record!r}" if lacks_record is not None else f"no place for {lacks_place!r}")
    )


def check_stored(
    pack: npt.NDArray[np.uint32],
    offset: Uint64s,
    length: npt.NDArray[np.uint32],
    codec: npt.NDArray[np.uint8],
    *,
    pack_sizes: Uint64s,
    what: str,
) -> None:
    """Refuse chunks that cannot lie where they say.

    Raises:
        CorruptionError: names the first row.
    """
    refuse_rows(pack >= len(pack_sizes), what, f"names a pack beyond the {len(pack_sizes)} there are")
    sizes = pack_sizes[pack]
    # written so that nothing can overflow
    refuse_rows((length > sizes) | (offset > sizes - np.minimum(length, sizes)), what, "ends after its pack's end")
    refuse_rows(length == 0, what, "has no bytes")
    refuse_rows(codec > max(KNOWN_CODECS), what, f"has a codec beyond those of this version, {KNOWN_CODECS}")


def check_chunks(chunks: ChunkTable, shapes: TensorShapes, what: str) -> None:
    """Refuse a chunk table whose rows do not belong to the tensors.

    Raises:
        CorruptionError: names the first row, as ``row`` in its context too.
    """
    num_chunks, first = len(chunks), chunks.first
    check_first(first, len(shapes.ndim), num_chunks, what)
    tensor = np.repeat(
        np.arange(len(shapes.ndim), dtype=np.int64), first[1:].astype(np.int64) - first[:-1].astype(np.int64)
    )
    refuse_rows(chunks.tile >= shapes.num_tiles[tensor], what, "is of a tile that its tensor does not have")
    unsorted = np.zeros(num_chunks, np.bool_)
    unsorted[1:] = (chunks.tile[1:] < chunks.tile[:-1]) & (tensor[1:] == tensor[:-1])
    refuse_rows(unsorted, what, "is of an earlier tile than the row before it")
    check_partial_rows(chunks.partial_row, num_chunks, what)
    ndim = shapes.ndim[tensor[chunks.partial_row.astype(np.int64)]]
    if not np.array_equal(chunks.partial_start, partial_starts(ndim)) or len(chunks.partial_box) != 2 * int(ndim.sum()):
        raise CorruptionError(
            f"cannot use the {what}: its parts of tiles have other numbers of dims than their tensors"
        )
    refuse_rows(_bad_boxes(chunks, tensor, shapes), what, "is a box that is no proper part of its tile")


def check_first(first: Uint64s, num_tensors: int, num_chunks: int, what: str) -> None:
    """Refuse first rows of tensors that do not cut the table into one range a tensor.

    Raises:
        CorruptionError: they do not.
    """
    if len(first) != num_tensors + 1 or int(first[0]) != 0 or int(first[-1]) != num_chunks:
        raise CorruptionError(f"cannot use the {what}: its {num_tensors} tensors do not own its {num_chunks} chunks")
    if (first[1:] < first[:-1]).any():
        raise CorruptionError(f"cannot use the {what}: its tensors' rows are not in ascending order")


def check_partial_rows(rows: Uint64s, num_chunks: int, what: str) -> None:
    """Refuse a list of rows that is not ascending or goes beyond the table.

    Raises:
        CorruptionError: it is.
    """
    if len(rows) and (int(rows[-1]) >= num_chunks or (rows[1:] <= rows[:-1]).any()):
        raise CorruptionError(f"cannot use the {what}: its list of partial rows is not ascending within its chunks")


def partial_starts(ndim: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where the boxes of partial rows start in one flat list, given the number of dims of each."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(2 * ndim)])


def _bad_boxes(chunks: ChunkTable, tensor: npt.NDArray[np.int64], shapes: TensorShapes) -> Bools:
    """Return per row whether it is a part of a tile that is empty, not inside it, or all of it.

    Rows of tensors with equally many dims are looked at together.
    """
    bad = np.zeros(len(chunks), np.bool_)
    rows = chunks.partial_row.astype(np.int64)
    ndim = shapes.ndim[tensor[rows]]
    for dims in np.unique(ndim).tolist():
        at = np.flatnonzero(ndim == dims)
        low, extent = tile_boxes(shapes, tensor[rows[at]], chunks.tile[rows[at]].astype(np.int64), dims)
        flat = chunks.partial_box[chunks.partial_start[at][:, None] + np.arange(2 * dims)]
        start, size = flat[:, :dims], flat[:, dims:]
        first, edge = low.astype(np.uint64), extent.astype(np.uint64)
        room = edge - np.minimum(start - np.minimum(first, start), edge)  # unsigned: no step may go below zero
        inside = ((start >= first) & (size >= 1) & (size <= room)).all(axis=1)
        bad[rows[at]] = ~inside | (size == edge).all(axis=1)
    return bad


def tile_boxes(
    shapes: TensorShapes, tensor: npt.NDArray[np.int64], tile: npt.NDArray[np.int64], ndim: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (offsets, sizes), each ``int64[n, ndim]``, of tiles of many tensors that all have ``ndim`` dims."""
    at = shapes.start[tensor][:, None] + np.arange(ndim)
    shape, edge = shapes.shape[at], shapes.tile[at]
    counts = -(-shape // edge)
    offsets = np.empty_like(shape)
    rest = tile
    for dim in reversed(range(ndim)):
        rest, index = np.divmod(rest, counts[:, dim])
        offsets[:, dim] = index * edge[:, dim]
    return offsets, np.minimum(edge, shape - offsets)


def refuse_tensors(bad: Bools, what: str, why: str) -> None:
    """Refuse a table some tensors of which are bad.

    Raises:
        CorruptionError: any is; names the first.
    """
    if bad.any():
        raise CorruptionError(f"cannot use the {what}: tensor {int(bad.argmax())} of {len(bad)} has {why}")


def refuse_rows(bad: Bools, what: str, why: str) -> None:
    """Refuse a table some rows of which are bad.

    Raises:
        CorruptionError: any is; names the first, as ``row`` in its context too.
    """
    if bad.any():
        row = int(bad.argmax())
        raise CorruptionError(f"cannot use the {what}: chunk {row} of {len(bad)} {why}", row=row)


def internal(error: CorruptionError) -> InternalError:
    """Return the error for a table that this process was about to write."""
    return InternalError(f"refused to write what no reader would take: {error.message}", **error.context)
