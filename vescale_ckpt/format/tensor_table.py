"""The tensor table of a manifest: paths and names as JSON, everything else as columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.format.checks import TensorShapes
from vescale_ckpt.format.document import Section
from vescale_ckpt.format.json_text import decode_json, encode_json, take
from vescale_ckpt.format.kinds import Kind
from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.state.keys import MAX_INT_KEY, MIN_INT_KEY, type_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.document import Document
    from vescale_ckpt.state.tree import Path

NO_ALIAS: Final = 2**32 - 1
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""Names of dtypes and kinds. Which of them a reader knows shows when a tensor is used, so that one new one among
thousands does not close the whole snapshot to it."""


def encode_tensors(tensors: Sequence[TensorRecord]) -> list[Section]:
    """Return the sections of a table that ``check_tensors`` has passed."""
    dtypes = sorted({tensor.dtype for tensor in tensors})
    kinds = sorted({tensor.kind for tensor in tensors})
    dtype_index = {name: index for index, name in enumerate(dtypes)}
    kind_index = {name: index for index, name in enumerate(kinds)}
    for name in [*dtypes, *kinds]:
        if not _WORD.fullmatch(name):
            raise CorruptionError(f"cannot use the manifest: {name[:80]!r} is no name of a dtype or of a kind")
    text = {"dtypes": dtypes, "kinds": kinds, "paths": [list(tensor.path) for tensor in tensors]}
    num = len(tensors)
    aliases = [NO_ALIAS if tensor.alias_of is None else tensor.alias_of for tensor in tensors]
    return [
        Section(Kind.TENSORS, encode_json(text)),
        Section(Kind.TENSOR_DTYPE, np.fromiter((dtype_index[tensor.dtype] for tensor in tensors), np.uint16, num)),
        Section(Kind.TENSOR_KIND, np.fromiter((kind_index[tensor.kind] for tensor in tensors), np.uint16, num)),
        Section(Kind.TENSOR_NDIM, np.fromiter((len(tensor.shape) for tensor in tensors), np.uint8, num)),
        Section(Kind.TENSOR_SHAPE, np.array([size for tensor in tensors for size in tensor.shape], np.uint64)),
        Section(Kind.TENSOR_TILE, np.array([edge for tensor in tensors for edge in tensor.tile], np.uint64)),
        Section(Kind.TENSOR_ALIAS, np.array(aliases, np.uint32)),
    ]


def decode_tensors(document: Document) -> tuple[tuple[TensorRecord, ...], TensorShapes]:
    """Return the records of a document, and their shapes as columns, which were checked.

    Raises:
        FormatError: a section is not there, or its JSON is not of this form.
        CorruptionError: the sections do not fit together, or a shape is none.
    """
    what = f"{document.what}'s table of tensors"
    text = decode_json(document.section(Kind.TENSORS), what, floats=False)
    paths = [decode_path(keys, what) for keys in take(text, "paths", list, what)]
    dtypes = _names(document.column(Kind.TENSOR_DTYPE, np.uint16), take(text, "dtypes", list, what), what)
    kinds = _names(document.column(Kind.TENSOR_KIND, np.uint16), take(text, "kinds", list, what), what)
    ndim = document.column(Kind.TENSOR_NDIM, np.uint8).astype(np.int64)
    aliases = document.column(Kind.TENSOR_ALIAS, np.uint32)
    lengths = [len(dtypes), len(kinds), len(ndim), len(aliases)]
    if lengths != [len(paths)] * len(lengths):
        raise CorruptionError(f"cannot read the {what}: {len(paths)} paths and columns of {lengths}")
    shape, tile = _sizes(document, Kind.TENSOR_SHAPE, ndim), _sizes(document, Kind.TENSOR_TILE, ndim)
    is_alias = np.flatnonzero(aliases != NO_ALIAS).tolist()
    shapes = TensorShapes.of_columns(ndim, shape, tile, aliases=is_alias, what=what)
    alias_of: list[int | None] = [None] * len(paths)
    for index in is_alias:
        alias_of[index] = int(aliases[index])
    columns = zip(paths, dtypes, _cut(shape, ndim), _cut(tile, ndim), kinds, alias_of, strict=True)
    return tuple([TensorRecord(*fields) for fields in columns]), shapes


def decode_path(keys: Any, what: str) -> Path:
    """Return a path of a JSON array of str and int keys."""
    if keys.__class__ is not list:
        raise FormatError(f"cannot read the {what}: a path is {type_name(keys)}")
    for key in keys:
        if key.__class__ is not str and not (key.__class__ is int and MIN_INT_KEY <= key <= MAX_INT_KEY):
            raise FormatError(f"cannot read the {what}: a key of a path is {type_name(key)} or has too many bits")
    return tuple(keys)


def _names(column: npt.NDArray[np.uint16], names: list[Any], what: str) -> list[str]:
    """Return a column of names from a column of their indexes."""
    if not all(name.__class__ is str and _WORD.fullmatch(name) for name in names):
        raise FormatError(f"cannot read the {what}: one of its dtypes or kinds is no name")
    if len(column) and int(column.max()) >= len(names):
        raise CorruptionError(f"cannot read the {what}: name {int(column.max())} of {len(names)} is asked for")
    return [names[index] for index in column.tolist()]


def _sizes(document: Document, kind: Kind, ndim: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a flat column of sizes, as many as all dims together."""
    flat = document.column(kind, np.uint64)
    if len(flat) != int(ndim.sum()) or int(flat.max(initial=0)) >= 2**63:
        raise CorruptionError(f"cannot read the {document.what}: its {kind.name} does not fit its numbers of dims")
    return flat.astype(np.int64)


def _cut(flat: npt.NDArray[np.int64], ndim: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Return a flat column cut into tuples of ``ndim`` items."""
    ends = np.cumsum(ndim).tolist()
    values = flat.tolist()
    return [tuple(values[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
