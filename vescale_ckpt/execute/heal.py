"""Heal: make a snapshot's objects in the store sound again, from the store's mirror."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest
from vescale_storage import loop
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.repair import repair_manifest, repair_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vescale_storage.backend import Backend
    from vescale_storage.refs import Ref


@dataclass(frozen=True, kw_only=True, slots=True)
class HealReport:
    """What healing one snapshot found and did."""

    snapshot: str
    """``run@step``."""
    checked: int
    """Objects that were read whole: the manifest and the packs."""
    healed: tuple[str, ...]
    """Keys of those that were missing, cut or damaged, and are written anew."""
    lost: tuple[str, ...]
    """One line for each object of which some part is sound in no copy."""

    @property
    def ok(self) -> bool:
        """Whether all of the snapshot is sound now."""
        return not self.lost


def heal_snapshot(copies: Sequence[Backend], ref: Ref, progress: Callable[[int], None] | None = None) -> HealReport:
    """Read all that a snapshot refers to in the first copy, and write anew what is not sound there.

    Args:
        copies: the store, and its mirrors.
        ref: the snapshot.
        progress: called with the size of each pack that was checked.

    Raises:
        CorruptionError: no copy has the manifest whole; nothing was changed.
        StorageError: a copy cannot be read, or the store not be written.
    """
    healed: list[str] = []
    lost: list[str] = []
    if loop.run(repair_manifest(copies, ref.manifest)):
        healed.append(manifest_key(ref.manifest))
    packs = open_manifest(fetch_manifest(copies[0], ref), ref).packs
    for pack in packs:
        try:
            if loop.run(repair_pack(copies, pack.name, pack.size_bytes)):
                healed.append(pack_key(pack.name))
        except CorruptionError as error:
            lost.append(str(error))
        if progress is not None:
            progress(pack.size_bytes)
    return HealReport(snapshot=f"{ref.run}@{ref.step}", checked=1 + len(packs), healed=tuple(healed), lost=tuple(lost))
