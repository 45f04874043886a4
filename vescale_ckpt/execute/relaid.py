"""Relaid: chunks of earlier snapshots that hold the same elements as a chunk of this save, cut along other lines.

A digest finds a chunk only where both saves cut a tile alike. Where another layout cut it, the elements are compared
instead: a stored chunk that lies inside ours by its digest, one that reaches beyond ours by reading it. What a rank
has found equal of a chunk that reaches beyond its own is a share; ``execute.shares`` puts the ranks' shares together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vescale_ckpt.errors import CorruptionError, ObjectNotFoundError, StorageError
from vescale_ckpt.execute.dedup import Location
from vescale_ckpt.plan.load_plan import chunks_touching
from vescale_ckpt.stage.raw import memory_of, shaped
from vescale_ckpt.state.dtypes import dtype_from_name, item_bytes
from vescale_storage import loop
from vescale_storage.digest import digest
from vescale_storage.keys import pack_key
from vescale_storage.pack import Codec, decode_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vescale_ckpt.format.records import Manifest, PackRecord, TensorRecord
    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.plan.parts import ChunkPlan
    from vescale_storage.backend import Backend


@dataclass(frozen=True, slots=True)
class Claim:
    """A stored chunk of which this rank holds the elements, all or some of them."""

    location: Location
    digest: bytes
    box: Box
    """What the stored chunk holds, in the global tensor."""
    share: Box
    """What of it this rank has compared: equal to ``box``, or inside it."""


class Relaid:
    """Finds claims in the snapshots that a save is deduplicated against.

    A tensor of which one comparison with a snapshot failed is not compared with it again: weights that have changed
    cost one look a tensor.

    Args:
        backend: where the packs are.
        records: the plan's tensors.
        manifests: of the snapshots.
        usable: whether a pack may be referred to.
    """

    def __init__(
        self,
        backend: Backend,
        records: Sequence[TensorRecord],
        manifests: Sequence[Manifest],
        usable: Callable[[PackRecord], bool],
    ) -> None:
        self._backend = backend
        self._records = records
        self._manifests = manifests
        self._usable = usable
        self._sources: dict[int, list[_Source]] = {}

    def find(self, chunk: ChunkPlan, raw: torch.Tensor) -> tuple[Claim, ...]:
        """Return the stored chunks that together hold all elements of a chunk, or nothing.

        Args:
            chunk: a chunk of this save, of which no snapshot has the digest.
            raw: its bytes (uint8, 1-D), row-major; aligned for the tensor's items.
        """
        if chunk.tensor not in self._sources:
            self._sources[chunk.tensor] = self._sources_of(chunk.tensor)
        for source in list(self._sources[chunk.tensor]):
            claims = self._compared(source, chunk, raw)
            if claims is None:
                self._sources[chunk.tensor].remove(source)
            elif claims:
                return claims
        return ()

    def _sources_of(self, tensor: int) -> list[_Source]:
        record = self._records[tensor]
        found = []
        for manifest in self._manifests:
            index = manifest.by_path.get(record.path)
            if index is None:
                continue
            index = manifest.resolve(index)
            stored = manifest.tensors[index]
            if (stored.dtype, stored.shape, stored.tile) == (record.dtype, record.shape, record.tile):
                places, _ = manifest.chunks.partials_of(stored, manifest.chunks.rows(index))
                found.append(_Source(manifest, index, len(places) > 0))
        return found

    def _compared(self, source: _Source, chunk: ChunkPlan, raw: torch.Tensor) -> tuple[Claim, ...] | None:
        """Return claims on all of a chunk, () where this snapshot cut it alike, None where it differs."""
        if chunk.whole_tile and not source.has_parts:
            return ()
        manifest = source.manifest
        stored = list(chunks_touching(manifest, source.tensor, chunk.box))
        if len(stored) == 1 and stored[0][1] == chunk.box:
            return ()
        data = shaped(raw, 0, dtype_from_name(self._records[chunk.tensor].dtype), chunk.box.shape)
        claims = []
        # What needs no reading comes first: most of what has changed is seen there.
        for row, box, share in sorted(stored, key=lambda entry: entry[1] != entry[2]):
            location = Location.of(manifest.chunks, manifest.packs, row)
            if not self._usable(location.pack):
                return None
            claim = Claim(location, manifest.chunks.digest[row].tobytes(), box, share)
            if not self._holds(claim, bytes_in(data, chunk.box, share), self._records[chunk.tensor]):
                return None
            claims.append(claim)
        return tuple(claims)

    def _holds(self, claim: Claim, mine: memoryview, record: TensorRecord) -> bool:
        """Return whether the share of a stored chunk has these bytes."""
        if claim.share == claim.box:
            return digest(mine) == claim.digest
        try:
            theirs = read_box(self._backend, record, claim.location, claim.digest, claim.box)
        except (ObjectNotFoundError, CorruptionError, StorageError):
            return False  # it is written anew then; who loads the other snapshot is told of its damage
        return bytes_in(theirs, claim.box, claim.share) == mine


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A tensor as one snapshot has it."""

    manifest: Manifest
    tensor: int
    """Index in the manifest's tensors."""
    has_parts: bool
    """Whether some of its chunks are parts of tiles."""


def read_box(backend: Backend, record: TensorRecord, location: Location, name: bytes, box: Box) -> torch.Tensor:
    """Return the elements of a stored chunk, as integers or 16-byte items of the shape of its box.

    Raises:
        CorruptionError: its bytes do not have the digest ``name``.
        ObjectNotFoundError: its pack is gone.
        StorageError: the storage failed.
    """
    key = pack_key(location.pack.name)
    memory = memoryview(bytearray(location.length))
    loop.run(backend.get_into(key, location.offset, memory))
    raw = decode_chunk(memory, Codec(location.codec), box.volume * item_bytes(record.dtype))
    if digest(raw) != name:
        raise CorruptionError(f"the bytes at offset {location.offset} of {key} do not have their digest", key=key)
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return shaped(buffer, 0, dtype_from_name(record.dtype), box.shape)


def bytes_in(data: torch.Tensor, box: Box, part: Box) -> memoryview:
    """Return the bytes of a part of a box, row-major, of which ``data`` has the elements."""
    return memory_of(data[part.relative_to(box).slices].contiguous().reshape(-1).view(torch.uint8))
