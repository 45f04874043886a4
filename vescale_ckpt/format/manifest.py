"""The manifest's bytes: a document with JSON for what is small or ragged and columns for what is long.

A manifest is named by the digest of its bytes, which readers check first; decoding is safe without that too: any bytes
give a manifest whose tables fit together, or an error.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vescale_ckpt.errors import CorruptionError, FormatError, InvalidInputError
from vescale_ckpt.format.checks import (
    TensorShapes,
    check_chunks,
    check_first,
    check_partial_rows,
    check_stored,
    check_tensors,
    check_tree,
    internal,
    partial_starts,
)
from vescale_ckpt.format.chunk_columns import decode_columns, encode_columns
from vescale_ckpt.format.collector import paused_collector
from vescale_ckpt.format.document import Section, decode_document, encode_document
from vescale_ckpt.format.json_text import check_json, decode_json, encode_json, take, take_number
from vescale_ckpt.format.kinds import Kind
from vescale_ckpt.format.packs import check_packs, decode_packs, encode_packs, pack_sizes
from vescale_ckpt.format.records import FORMAT_VERSION, ChunkTable, Manifest
from vescale_ckpt.format.tensor_table import decode_tensors, encode_tensors
from vescale_ckpt.format.tree_codec import decode_tree, encode_tree
from vescale_ckpt.state.keys import is_unicode
from vescale_storage.digest import hexdigest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_ckpt.format.document import Document
    from vescale_ckpt.format.records import PackRecord, TensorRecord
    from vescale_ckpt.state.tree import Node
    from vescale_storage.backend import Buffer

MAGIC: Final = b"\x89VSMAN\r\n"
"""Not text, and broken by whatever changes line ends."""
WHAT: Final = "manifest"
_TRANSACTION: Final = re.compile(r"[0-9a-f]{32}")
_MAX_STEP: Final = 10**12 - 1
_MAX_WORLD_SIZE: Final = 2**31


def manifest_name(data: Buffer) -> str:
    """Return the name of a manifest: 64 hex digits, the digest of its bytes."""
    return hexdigest(data)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, always the same for the same manifest.

    Raises:
        InvalidInputError: the user's metadata or a value of the tree is of a kind that no manifest holds.
        InternalError: its tables do not fit together, so that no reader would take it.
    """
    sections = [
        Section(Kind.HEAD, encode_json(_head(manifest))),
        Section(Kind.TREE, encode_tree(manifest.tree)),
    ]
    try:
        shapes = TensorShapes.of(manifest.tensors, WHAT)
        check_packs(manifest.packs, WHAT)
        _check_tables(manifest.tree, manifest.tensors, shapes, manifest.chunks, manifest.packs)
        sections += encode_tensors(manifest.tensors)
    except CorruptionError as error:
        raise internal(error) from error
    sections += [Section(Kind.CHUNK_FIRST, manifest.chunks.first), *encode_columns(manifest.chunks)]
    sections += encode_packs(manifest.packs, Kind.PACK_NAME, Kind.PACK_SIZE)
    return encode_document(MAGIC, FORMAT_VERSION, sections)


def decode_manifest(data: Buffer) -> Manifest:
    """Return the manifest of some bytes; its columns are read-only views of them.

    Raises:
        UnsupportedVersionError: it needs a newer reader; names both versions.
        FormatError: it is no manifest.
        CorruptionError: it is one, and damaged: its tables do not fit together.
    """
    with paused_collector():
        return _decode(data)


def _decode(data: Buffer) -> Manifest:
    document = decode_document(data, magic=MAGIC, version=FORMAT_VERSION, what=WHAT, known=frozenset(Kind))
    head = decode_json(document.section(Kind.HEAD), f"{WHAT}'s head", floats=True)
    packs = decode_packs(document, Kind.PACK_NAME, Kind.PACK_SIZE)
    tensors, shapes = decode_tensors(document)
    chunks = _decode_chunks(document, shapes)
    tree = decode_tree(document.section(Kind.TREE))
    _check_tables(tree, tensors, shapes, chunks, packs)
    manifest = Manifest(
        run=take(head, "run", str, WHAT),
        step=take(head, "step", int, WHAT),
        created_seconds=take_number(head, "created_seconds", WHAT),
        transaction=take(head, "transaction", str, WHAT),
        world_size=take(head, "world_size", int, WHAT),
        tree=tree,
        tensors=tensors,
        chunks=chunks,
        packs=packs,
        writer=take(head, "writer", str, WHAT),
        metadata=take(head, "metadata", dict, WHAT),
        version=document.version,
    )
    try:
        _head(manifest)
    except InvalidInputError as error:
        raise FormatError(f"cannot read the {WHAT}: {error.message}") from error
    return manifest


def _head(manifest: Manifest) -> dict[str, Any]:
    """Return the head as JSON, after a look at each field."""
    good = (
        (manifest.run != "" and is_unicode(manifest.run), "run", manifest.run),
        (type(manifest.step) is int and 0 <= manifest.step <= _MAX_STEP, "step", manifest.step),
        (math.isfinite(manifest.created_seconds), "created_seconds", manifest.created_seconds),
        (_TRANSACTION.fullmatch(manifest.transaction) is not None, "transaction", manifest.transaction),
        (
            type(manifest.world_size) is int and 1 <= manifest.world_size <= _MAX_WORLD_SIZE,
            "world_size",
            manifest.world_size,
        ),
        (is_unicode(manifest.writer), "writer", manifest.writer),
    )
    for fine, name, value in good:
        if not fine:
            raise InvalidInputError(f"a manifest cannot have {name} = {str(value)[:80]!r}")
    check_json(manifest.metadata, "metadata")
    return {
        "run": manifest.run,
        "step": manifest.step,
        "created_seconds": float(manifest.created_seconds),
        "transaction": manifest.transaction,
        "world_size": manifest.world_size,
        "writer": manifest.writer,
        "metadata": manifest.metadata,
    }


def _check_tables(
    tree: Node,
    tensors: Sequence[TensorRecord],
    shapes: TensorShapes,
    chunks: ChunkTable,
    packs: Sequence[PackRecord],
) -> None:
    """Refuse tables that do not fit together."""
    check_tensors(tensors, WHAT)
    check_tree(tree, tensors, WHAT)
    check_stored(chunks.pack, chunks.offset, chunks.length, chunks.codec, pack_sizes=pack_sizes(packs), what=WHAT)
    check_chunks(chunks, shapes, WHAT)


def _decode_chunks(document: Document, shapes: TensorShapes) -> ChunkTable:
    """Return the chunk table of a document, its rows not yet looked at."""
    columns = decode_columns(document)
    first = document.column(Kind.CHUNK_FIRST, np.uint64)
    num_chunks = len(columns["tile"])
    check_first(first, len(shapes.ndim), num_chunks, WHAT)
    check_partial_rows(columns["partial_row"], num_chunks, WHAT)
    tensor = np.searchsorted(first, columns["partial_row"], side="right") - 1
    return ChunkTable(first=first, partial_start=partial_starts(shapes.ndim[tensor]), **columns)
