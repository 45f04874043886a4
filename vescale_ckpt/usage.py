"""Usage: what snapshots take in storage, and what sharing saved, from their manifests alone. Pure: no storage."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.state.dtypes import item_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest


@dataclass(frozen=True, slots=True)
class SnapshotUsage:
    """What one snapshot takes."""

    run: str
    step: int
    version: int
    created_seconds: float
    """Seconds since the epoch."""
    tensor_bytes: int
    """Of its tensors in memory; those that are tied count once."""
    stored_bytes: int
    """Of its chunks in storage, each once."""
    new_bytes: int
    """Of those that no snapshot measured before it has."""
    own_bytes: int
    """Of those that no other snapshot has: what deleting this one alone makes collectable."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What all measured snapshots take together."""

    snapshots: tuple[SnapshotUsage, ...]
    tensor_bytes: int
    """What every snapshot would take if nothing were shared or compressed."""
    stored_bytes: int
    """Of chunks, each once."""
    packs: dict[str, int]
    """Name -> size of every pack that a snapshot refers to."""

    @property
    def saved_bytes(self) -> int:
        """What sharing, ties aside, and compression have saved."""
        return self.tensor_bytes - self.stored_bytes


class UsageMeter:
    """Measures manifests one after another; what is shared is counted for the first that has it.

    Memory is some 24 bytes for every stored chunk, however many snapshots share it.
    """

    def __init__(self) -> None:
        self._start: dict[str, int] = {}
        self._packs: dict[str, int] = {}
        self._end = 0
        # All packs one after another are one long tape: a place on it is a pack and an offset.
        self._place: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._length: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._owner: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._is_shared: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._measured: list[SnapshotUsage] = []

    def add(self, manifest: Manifest, version: int = 1) -> None:
        """Measure one more snapshot."""
        place, length = self._places(manifest)
        at = np.searchsorted(self._place, place)
        known = np.zeros(len(place), np.bool_)
        inside = at < len(self._place)
        known[inside] = self._place[at[inside]] == place[inside]
        self._is_shared[at[known]] = True
        new = ~known
        owner = len(self._measured)
        self._place = np.insert(self._place, at[new], place[new])
        self._length = np.insert(self._length, at[new], length[new])
        self._owner = np.insert(self._owner, at[new], owner)
        self._is_shared = np.insert(self._is_shared, at[new], False)
        self._measured.append(
            SnapshotUsage(
                run=manifest.run,
                step=manifest.step,
                version=version,
                created_seconds=manifest.created_seconds,
                tensor_bytes=tensors_bytes(manifest),
                stored_bytes=int(length.sum()),
                new_bytes=int(length[new].sum()),
                own_bytes=0,
            )
        )

    def usage(self) -> Usage:
        """Return what was measured so far."""
        own = np.bincount(
            self._owner[~self._is_shared],
            weights=self._length[~self._is_shared].astype(np.float64),
            minlength=len(self._measured),
        )
        snapshots = tuple(
            dataclasses.replace(snapshot, own_bytes=int(own[number])) for number, snapshot in enumerate(self._measured)
        )
        return Usage(
            snapshots,
            tensor_bytes=sum(snapshot.tensor_bytes for snapshot in snapshots),
            stored_bytes=int(self._length.sum()),
            packs=dict(self._packs),
        )

    def _places(self, manifest: Manifest) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return (place, length) of a manifest's chunks, each place once and ascending."""
        for pack in manifest.packs:
            if pack.name not in self._start:
                self._start[pack.name] = self._end
                self._packs[pack.name] = pack.size_bytes
                self._end += pack.size_bytes
        starts = np.array([self._start[pack.name] for pack in manifest.packs], np.uint64)
        chunks = manifest.chunks
        if not len(chunks):
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        place, first = np.unique(starts[chunks.pack] + chunks.offset, return_index=True)
        return place, chunks.length[first].astype(np.int64)


def measure(manifests: Sequence[Manifest]) -> Usage:
    """Return what snapshots take; what is shared is counted for the first that has it."""
    meter = UsageMeter()
    for manifest in manifests:
        meter.add(manifest)
    return meter.usage()


def tensors_bytes(manifest: Manifest) -> int:
    """Return the bytes of a snapshot's tensors in memory; those that are tied count once."""
    return sum(
        math.prod(record.shape) * item_bytes(record.dtype) for record in manifest.tensors if record.alias_of is None
    )


@dataclass(frozen=True, slots=True)
class NameUsage:
    """What the tensors below one dotted name take."""

    name: str
    tensors: int
    tensor_bytes: int
    stored_bytes: int
    """Of their chunks, each counted for the first tensor that has it."""


def by_name(manifest: Manifest, depth: int | None = None) -> list[NameUsage]:
    """Return what a snapshot's tensors take, summed over names of at most ``depth`` parts, in the tree's order.

    A part is what stands between two dots, also inside the key of a module's weight. None sums nothing up.
    """
    seen: set[tuple[int, int]] = set()
    sums: dict[str, list[int]] = {}
    for index, record in enumerate(manifest.tensors):
        name = record.fqn if depth is None else ".".join(record.fqn.split(".")[:depth])
        total = sums.setdefault(name, [0, 0, 0])
        total[0] += 1
        if record.alias_of is None:
            total[1] += math.prod(record.shape) * item_bytes(record.dtype)
            total[2] += _stored(manifest, index, seen)
    return [NameUsage(name, *total) for name, total in sums.items()]


def _stored(manifest: Manifest, tensor: int, seen: set[tuple[int, int]]) -> int:
    chunks, rows = manifest.chunks, manifest.chunks.rows(tensor)
    part = slice(rows.start, rows.stop)
    stored = 0
    for pack, offset, length in zip(
        chunks.pack[part].tolist(), chunks.offset[part].tolist(), chunks.length[part].tolist(), strict=True
    ):
        if (pack, offset) not in seen:
            seen.add((pack, offset))
            stored += length
    return stored
