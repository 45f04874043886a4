"""Shares: stored chunks of which each rank found only its own part equal, put together by the coordinator.

Where the ranks' shares are all of a stored chunk, the snapshot refers to it. Where one rank's part has changed, the
parts of the others are cut out of the stored chunk and stored as chunks of their own: nobody has kept them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.execute.dedup import Location
from vescale_ckpt.execute.relaid import bytes_in, read_box
from vescale_ckpt.execute.write import renamed
from vescale_ckpt.format.fragment import Fragment, FragmentChunks
from vescale_ckpt.format.records import PackRecord
from vescale_storage import loop
from vescale_storage.digest import digest
from vescale_storage.pack import Codec, PackBuilder, put_pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_ckpt.format.records import TensorRecord
    from vescale_ckpt.geometry.box import Box
    from vescale_storage.backend import Backend
    from vescale_storage.pack import PackEntry

_PACK_BYTES = 8 << 20
"""What is cut out is held in memory up to this, beyond the budget of the save; it is little, and rare."""


@dataclass(frozen=True, slots=True)
class _Share:
    fragment: int
    """Place in the sequence of fragments."""
    row: int
    part: Box


@dataclass(frozen=True, slots=True)
class _Shared:
    """A stored chunk that several ranks have shares of."""

    tensor: int
    tile: int
    digest: bytes
    box: Box


def settle_shares(
    backend: Backend, fragments: Sequence[Fragment], tensors: Sequence[TensorRecord]
) -> Sequence[Fragment]:
    """Return fragments without shares that say the same.

    Args:
        backend: where the packs are; cut-out parts are put there, durable on return.
        fragments: of all ranks.
        tensors: the tensor table that the fragments index.

    Raises:
        CorruptionError: a stored chunk that has to be cut is damaged.
        ObjectNotFoundError: its pack is gone.
        StorageError: the storage failed.
    """
    found: defaultdict[_Shared, list[_Share]] = defaultdict(list)
    for number, fragment in enumerate(fragments):
        chunks = fragment.chunks
        for row, box, part in chunks.shares():
            shared = _Shared(int(chunks.tensor[row]), int(chunks.tile[row]), chunks.digest[row].tobytes(), box)
            found[shared].append(_Share(number, row, part))
    if not found:
        return fragments
    keep = [np.ones(len(fragment.chunks), np.bool_) for fragment in fragments]
    cutter = _Cutter(backend)
    for shared, shares in found.items():
        # The plan gives every element to one rank, so parts do not overlap: their sizes tell whether they are all.
        whole = sum(share.part.volume for share in shares) == shared.box.volume
        for share in shares[1:] if whole else shares:
            keep[share.fragment][share.row] = False
        if not whole:
            cutter.cut(fragments[shares[0].fragment], shares[0].row, shared, [s.part for s in shares], tensors)
    settled = [dataclasses.replace(f, chunks=f.chunks.kept(k)) for f, k in zip(fragments, keep, strict=True)]
    return [*settled, *cutter.fragments()]


class _Cutter:
    """Stores parts of stored chunks as chunks of their own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._builder = PackBuilder()
        self._rows: list[tuple[_Shared, Box, PackEntry]] = []
        self._entries: dict[bytes, PackEntry] = {}
        self._done: list[Fragment] = []

    def cut(
        self, fragment: Fragment, row: int, shared: _Shared, parts: Sequence[Box], tensors: Sequence[TensorRecord]
    ) -> None:
        """Store some parts of a chunk that a row of a fragment refers to."""
        location = Location.of(fragment.chunks, fragment.packs, row)
        data = read_box(self._backend, tensors[shared.tensor], location, shared.digest, shared.box)
        for part in parts:
            raw = bytes(bytes_in(data, shared.box, part))
            name = digest(raw)
            if name not in self._entries:
                self._entries[name] = self._builder.add(name, [raw], Codec.RAW)
            self._rows.append((shared, part, self._entries[name]))
        if self._builder.size_bytes >= _PACK_BYTES:
            self._close()

    def fragments(self) -> list[Fragment]:
        """Return what was stored, each pack as a fragment of the coordinator."""
        if self._rows:
            self._close()
        return self._done

    def _close(self) -> None:
        pack = renamed(self._builder)  # nobody has looked whether a collection has marked the name that it would have
        loop.run(put_pack(self._backend, pack))
        chunks = FragmentChunks.of(
            tensor=[shared.tensor for shared, _, _ in self._rows],
            tile=[shared.tile for shared, _, _ in self._rows],
            digest=[entry.digest for _, _, entry in self._rows],
            pack=[0] * len(self._rows),
            offset=[entry.offset for _, _, entry in self._rows],
            length=[entry.length for _, _, entry in self._rows],
            codec=[int(entry.codec) for _, _, entry in self._rows],
            partial=[(row, part) for row, (_, part, _) in enumerate(self._rows)],
        )
        record = PackRecord(pack.name_hex, pack.size_bytes)
        self._done.append(Fragment(rank=0, plan_key=b"", chunks=chunks, packs=(record,)))
        self._builder, self._rows, self._entries = PackBuilder(), [], {}
