"""The plan of a mirroring: which snapshots, tags and packs the target lacks. Pure: no storage, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_storage.collect.marks import Marked
    from vescale_storage.refs import Ref, Tag


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """One snapshot that the target lacks."""

    ref: Ref
    packs: Mapping[str, int]
    """Name -> size of the packs that nobody before it brings."""

    @property
    def num_bytes(self) -> int:
        """Of packs to copy."""
        return sum(self.packs.values())


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """What mirroring does; printing it is the dry run."""

    copies: tuple[SnapshotCopy, ...]
    """In the order of their commits, so that the target is a store of whole snapshots at every moment."""
    tags: tuple[Tag, ...]
    present: tuple[Ref, ...]
    """Snapshots that the target has already."""
    conflicts: tuple[str, ...]
    """What has the same name in the target and is another thing; it is left alone."""
    held_back: tuple[str, ...]
    """Snapshots that need a pack which a collection of the target is about to delete; a later call brings them."""

    @property
    def num_bytes(self) -> int:
        """Of packs to copy."""
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def num_packs(self) -> int:
        """That are to be copied."""
        return sum(len(copy.packs) for copy in self.copies)


def plan_mirror(
    refs: Sequence[Ref],
    tags: Sequence[Tag],
    packs_of: Mapping[str, Mapping[str, int]],
    *,
    there: Mapping[str, Ref | None],
    tags_there: Mapping[str, Tag | None],
    packs_there: Mapping[str, int],
    marked: Marked,
) -> MirrorPlan:
    """Return what the target lacks.

    Args:
        refs: the snapshots to be mirrored.
        tags: of them.
        packs_of: manifest -> name and size of its packs, of every snapshot that is not in the target.
        there: key -> the target's ref, None for one that cannot be read.
        tags_there: likewise.
        packs_there: name -> size of the target's packs.
        marked: what collections of the target are going to delete.
    """
    copies: list[SnapshotCopy] = []
    present: list[Ref] = []
    conflicts: list[str] = []
    held_back: list[str] = []
    coming: set[str] = set()
    for ref in sorted(refs, key=lambda ref: (ref.created_seconds, ref.key)):
        if ref.key in there:
            found = there[ref.key]
            if found is not None and found.manifest == ref.manifest:
                present.append(ref)
            else:
                conflicts.append(f"{ref.run}@{ref.step} version {ref.version}: the target has another one")
            continue
        needed = packs_of[ref.manifest]
        if any(name in marked for name in needed):
            held_back.append(f"{ref.run}@{ref.step}")
            continue
        new = {name: size for name, size in needed.items() if packs_there.get(name) != size and name not in coming}
        coming.update(new)
        copies.append(SnapshotCopy(ref, new))
    is_there = {ref.key for ref in present} | {copy.ref.key for copy in copies}
    new_tags = []
    for tag in tags:
        if tag.key in tags_there:
            found_tag = tags_there[tag.key]
            if found_tag is None or found_tag.ref != tag.ref:
                conflicts.append(f"{tag.ref.run}@{tag.name}: the target has it on another snapshot")
        elif tag.ref.key in is_there:
            new_tags.append(tag)
    return MirrorPlan(tuple(copies), tuple(new_tags), tuple(present), tuple(conflicts), tuple(held_back))
