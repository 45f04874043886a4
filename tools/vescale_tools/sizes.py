"""How large a snapshot is, by its manifest alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.state.dtypes import item_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from vescale_ckpt.format.records import Manifest


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some tensors of a snapshot."""

    tensors: int
    aliases: int
    """How many of them are other names of a tensor."""
    bytes: int
    """Of the tensors in memory; those that are tied count once."""
    stored_bytes: int
    """Of the chunks in storage; each once, whoever else refers to it."""
    chunks: int
    packs: int


def totals(manifest: Manifest, tensors: Collection[int] | None = None) -> Totals:
    """Return the sums over tensors, given by index; None: over all."""
    chosen = range(len(manifest.tensors)) if tensors is None else tensors
    owners = sorted({manifest.resolve(index) for index in chosen})
    chunks = manifest.chunks
    rows = np.concatenate([np.arange(r.start, r.stop) for r in map(chunks.rows, owners)] or [np.zeros(0, np.int64)])
    places = np.stack([chunks.pack[rows].astype(np.uint64), chunks.offset[rows]], axis=1)
    _, first = np.unique(places, axis=0, return_index=True)
    return Totals(
        tensors=len(chosen),
        aliases=sum(manifest.tensors[index].alias_of is not None for index in chosen),
        bytes=sum(tensor_bytes(manifest, index) for index in owners),
        stored_bytes=int(chunks.length[rows][first].sum(dtype=np.int64)),
        chunks=len(rows),
        packs=len(np.unique(chunks.pack[rows])),
    )


def tensor_bytes(manifest: Manifest, index: int) -> int:
    """Return the bytes of a tensor in memory."""
    record = manifest.tensors[index]
    num_items = 1
    for size in record.shape:
        num_items *= size
    return num_items * item_bytes(record.dtype)
