"""Which packs are worth rewriting, and manifests that find their chunks in the new ones. Pure: no storage, no clock."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.format.records import FORMAT_VERSION, Manifest, PackRecord
from vescale_storage.collect.plan import Tally
from vescale_storage.pack import ENTRY_BYTES, FOOTER_TRAILER_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt

    from vescale_storage.backend import ObjectInfo
    from vescale_storage.collect.roots import Roots
    from vescale_storage.refs import Ref

REPACK_BELOW = 0.5
"""A pack of which less than this part is live is rewritten."""


@dataclass(frozen=True, slots=True)
class PackUse:
    """How much of a pack is needed."""

    name: str
    size_bytes: int
    live_bytes: int
    """What a pack of nothing but the chunks that any snapshot or tag refers to would take, its footer included."""


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """What repacking would do; printing it is the dry run."""

    packs: tuple[PackUse, ...]
    """To be rewritten, by name."""
    refs: tuple[Ref, ...]
    """The snapshots that refer to them and get a new version."""
    pinned: Tally
    """Packs that are as dead but stay: a tag, an older version or a young snapshot needs them where they are."""
    replaced: tuple[Ref, ...]
    """Versions that an earlier repacking has replaced and, as it died, not deleted."""

    @property
    def reclaimed_bytes(self) -> int:
        """What is left to collect afterwards."""
        return sum(pack.size_bytes - pack.live_bytes for pack in self.packs)


class Liveness:
    """Counts, manifest by manifest, which bytes of which packs are needed; each chunk counts once, with its entry."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._rows: npt.NDArray[np.uint64] = np.zeros((0, 3), np.uint64)  # pack, offset, length; unique, ascending

    def add(self, manifest: Manifest) -> None:
        """Count the chunks of one more manifest."""
        if not len(manifest.chunks):
            return
        numbers = [self._number.setdefault(pack.name, len(self._number)) for pack in manifest.packs]
        chunks = manifest.chunks
        mine = np.stack(
            [np.array(numbers, np.uint64)[chunks.pack], chunks.offset, chunks.length.astype(np.uint64)], axis=1
        )
        rows = np.concatenate([self._rows, mine])
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
        self._rows = rows[is_first]

    def live_bytes(self) -> dict[str, int]:
        """Return the needed bytes of every pack that a manifest has named.

        The footer counts, or a small pack, which is mostly footer, would be rewritten each time with all of it live.
        """
        live = np.full(len(self._number), FOOTER_TRAILER_BYTES, np.uint64)
        np.add.at(live, self._rows[:, 0].astype(np.int64), self._rows[:, 2] + np.uint64(ENTRY_BYTES))
        return dict(zip(self._number, live.tolist(), strict=True))


def plan_repack(
    roots: Roots,
    packs: Mapping[str, ObjectInfo],
    live_bytes: Mapping[str, int],
    *,
    foreign: Collection[str],
    old_seconds: float,
    rewritten: Mapping[str, str],
    below: float = REPACK_BELOW,
) -> RepackPlan:
    """Return which packs and snapshots to rewrite.

    Args:
        roots: all refs and tags.
        packs: all listed packs, by name.
        live_bytes: needed bytes, by pack.
        foreign: manifests of a newer minor version: what they hold beyond our knowledge would be lost.
        old_seconds: packs and refs that are younger stay as they are.
        rewritten: manifest -> the transaction of the ref that replaces it.
        below: a pack is rewritten if less than this part of it is live.
    """
    newest: dict[tuple[str, int], Ref] = {}
    by_version = {(ref.run, ref.step, ref.version): ref for ref in roots.refs}
    for ref in roots.refs:
        best = newest.get((ref.run, ref.step))
        if best is None or ref.version > best.version:
            newest[ref.run, ref.step] = ref
    tagged = {(tag.ref.run, tag.ref.step) for tag in roots.tags}
    movable = [
        ref
        for place, ref in newest.items()
        if place not in tagged and ref.created_seconds <= old_seconds and ref.manifest not in foreign
    ]
    held = {tag.ref.manifest for tag in roots.tags} | {ref.manifest for ref in set(roots.refs) - set(movable)}
    pinned = frozenset().union(*(roots.packs_of.get(manifest, frozenset()) for manifest in held))
    sparse = [
        PackUse(name, info.size_bytes, live_bytes.get(name, 0))
        for name, info in sorted(packs.items())
        if name in roots.packs and live_bytes.get(name, 0) < below * info.size_bytes
        if info.modified_seconds <= old_seconds
    ]
    chosen = tuple(use for use in sparse if use.name not in pinned)
    names = {use.name for use in chosen}
    return RepackPlan(
        packs=chosen,
        refs=tuple(ref for ref in movable if not names.isdisjoint(roots.packs_of[ref.manifest])),
        pinned=sum((Tally(1, use.size_bytes) for use in sparse if use.name in pinned), Tally()),
        replaced=tuple(
            old
            for (run, step), ref in newest.items()
            if (old := by_version.get((run, step, ref.version - 1))) is not None
            if ref.transaction == rewritten.get(old.manifest) and (run, step) not in tagged
        ),
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's stored bytes are."""

    pack: str
    offset: int
    length: int
    codec: int


def moved(
    manifest: Manifest, places: Mapping[bytes, Place], sizes: Mapping[str, int], old_packs: Collection[str]
) -> Manifest | None:
    """Return a manifest that finds its chunks of ``old_packs`` in new places; None if it has none that moved.

    Args:
        manifest: the old one; nothing but where chunks are stored changes.
        places: digest -> new place, of chunks that were copied.
        sizes: of the new packs.
        old_packs: chunks of other packs stay where they are.
    """
    chunks = manifest.chunks
    is_old = np.fromiter((pack.name in old_packs for pack in manifest.packs), np.bool_, len(manifest.packs))
    rows = [row for row in np.flatnonzero(is_old[chunks.pack]).tolist() if chunks.digest[row].tobytes() in places]
    if not rows:
        return None
    packs = [*manifest.packs]
    number = {pack.name: i for i, pack in enumerate(packs)}
    pack, offset, length, codec = chunks.pack.copy(), chunks.offset.copy(), chunks.length.copy(), chunks.codec.copy()
    for row in rows:
        place = places[chunks.digest[row].tobytes()]
        if place.pack not in number:
            number[place.pack] = len(packs)
            packs.append(PackRecord(place.pack, sizes[place.pack]))
        pack[row], offset[row], length[row], codec[row] = number[place.pack], place.offset, place.length, place.codec
    used = np.zeros(len(packs), np.bool_)
    used[pack] = True
    renumbered = (np.cumsum(used) - 1).astype(np.uint32)
    return dataclasses.replace(
        manifest,
        chunks=dataclasses.replace(chunks, pack=renumbered[pack], offset=offset, length=length, codec=codec),
        packs=tuple(each for each, is_used in zip(packs, used.tolist(), strict=True) if is_used),
        version=FORMAT_VERSION,
    )


def stored_rows(manifest: Manifest, packs: Collection[str]) -> Sequence[int]:
    """Return the rows of the chunks that lie in some packs, by pack and offset."""
    chunks = manifest.chunks
    is_wanted = np.fromiter((pack.name in packs for pack in manifest.packs), np.bool_, len(manifest.packs))
    rows = np.flatnonzero(is_wanted[chunks.pack])
    found: list[int] = rows[np.lexsort((chunks.offset[rows], chunks.pack[rows]))].tolist()
    return found
