"""The dedup index: where a chunk with a given digest already lies, in earlier snapshots and in this save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import numpy.typing as npt

    from vescale_ckpt.execute.hints import Hints
    from vescale_ckpt.format.fragment import FragmentChunks
    from vescale_ckpt.format.records import ChunkTable, Manifest, PackRecord


@dataclass(frozen=True, slots=True)
class Location:
    """Where a chunk's stored bytes are."""

    pack: PackRecord
    offset: int
    length: int
    codec: int

    @classmethod
    def of(cls, chunks: ChunkTable | FragmentChunks, packs: Sequence[PackRecord], row: int) -> Location:
        """Return where the chunk of a row is, given the table that it is in and that table's packs."""
        pack = packs[int(chunks.pack[row])]
        return cls(pack, int(chunks.offset[row]), int(chunks.length[row]), int(chunks.codec[row]))


class DedupIndex:
    """Digest -> location over the chunk tables of some manifests.

    A sorted column of the digests' first eight bytes instead of a dict: 1.5 million chunks cost 24 MB, not 300.

    Args:
        manifests: of the snapshots to find chunks in.
        leave_out: names of packs that are not to be referred to, because they may be about to be deleted.
        hints: where to look for a chunk that none of ``manifests`` has, over all snapshots of the store.
    """

    def __init__(
        self, manifests: Sequence[Manifest], leave_out: Container[str] = (), hints: Hints | None = None
    ) -> None:
        self.manifests = tuple(manifests)
        self._leave_out = leave_out
        self._hints = hints
        self._tried: set[str] = set()
        self._manifests: list[Manifest] = []
        self._word = np.empty(0, dtype="<u8")
        self._source = np.empty(0, dtype=np.int64)
        self._row = np.empty(0, dtype=np.int64)
        self._add(manifests)

    def find(self, digest: bytes) -> Location | None:
        """Return where the bytes with this digest are stored, or None."""
        found = self._look(digest)
        if found is None and self._hints is not None:
            for name in self._hints.find(digest):
                if name in self._tried:
                    continue
                self._tried.add(name)
                manifest = self._hints.open(name)
                if manifest is not None:
                    self._add([manifest])
            found = self._look(digest)
        return found

    def may_refer(self, pack: PackRecord) -> bool:
        """Return whether a pack of one of the manifests may be referred to."""
        return pack.name not in self._leave_out

    def _look(self, digest: bytes) -> Location | None:
        word = np.frombuffer(digest[:8], dtype="<u8")[0]
        begin = int(np.searchsorted(self._word, word))
        while begin < len(self._word) and self._word[begin] == word:
            manifest, row = self._manifests[int(self._source[begin])], int(self._row[begin])
            chunks = manifest.chunks
            if chunks.digest[row].tobytes() == digest:
                return Location.of(chunks, manifest.packs, row)
            begin += 1
        return None

    def _add(self, manifests: Sequence[Manifest]) -> None:
        """Take in the chunks of more manifests."""
        words, sources, rows = [self._word], [self._source], [self._row]
        for manifest in manifests:
            usable = self._usable_rows(manifest)
            words.append(np.ascontiguousarray(manifest.chunks.digest[usable]).view("<u8")[:, 0])
            sources.append(np.full(len(usable), len(self._manifests), dtype=np.int64))
            rows.append(usable)
            self._manifests.append(manifest)
        word = np.concatenate(words)
        order = np.argsort(word, kind="stable")
        self._word = word[order]
        self._source = np.concatenate(sources)[order]
        self._row = np.concatenate(rows)[order]

    def _usable_rows(self, manifest: Manifest) -> npt.NDArray[np.int64]:
        """Return the rows of the chunks that may be referred to."""
        usable = np.fromiter(map(self.may_refer, manifest.packs), np.bool_, len(manifest.packs))
        return np.flatnonzero(usable[manifest.chunks.pack])
