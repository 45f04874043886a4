"""What a survey of a store finds, and what can be done about it, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from vescale_storage.keys import RefKey
    from vescale_storage.pack import PackEntry
    from vescale_storage.refs import Ref


class Kind(enum.StrEnum):
    """What is damaged, missing or strange."""

    ROOT = "root"
    REF = "ref"
    TAG = "tag"
    MANIFEST = "manifest"
    PACK = "pack"
    INDEX = "index"
    STRANGE = "strange"


@dataclass(frozen=True, slots=True)
class PutRoot:
    """Write a new ``store.json``."""


@dataclass(frozen=True, slots=True)
class RestoreRef:
    """Write a ref again, byte for byte, as a tag has kept it."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class ReplaceRef:
    """Commit the manifest that a damaged ref must have meant as the next version, then delete the damaged one."""

    damaged: RefKey
    manifest: str
    transaction: str
    created_seconds: float


@dataclass(frozen=True, slots=True)
class DropRef:
    """Delete a damaged version that a newer one has replaced."""

    damaged: RefKey


@dataclass(frozen=True, slots=True)
class CopyManifest:
    """Write a manifest again from the mirror."""

    name: str


@dataclass(frozen=True, slots=True)
class RebuildPack:
    """Put a pack together again from its own sound chunks, those of other packs, and the mirror."""

    name: str
    size_bytes: int
    entries: tuple[PackEntry, ...]


@dataclass(frozen=True, slots=True)
class PutIndex:
    """Make an index object anew from its manifest."""

    ref: Ref


Fix: TypeAlias = PutRoot | RestoreRef | ReplaceRef | DropRef | CopyManifest | RebuildPack | PutIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be."""

    kind: Kind
    key: str
    problem: str
    """What is wrong with it."""
    outlook: str
    """What a repair does about it, or why nothing can be done."""
    fix: Fix | None = None
    """None where nothing can be done."""
    snapshots: tuple[str, ...] = ()
    """That are hurt by it."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A whole manifest that no ref and no tag leads to: a snapshot that was deleted, or a save that never committed."""

    name: str
    run: str
    step: int
    created_seconds: float
    transaction: str
    num_packs: int
    num_missing: int
    """Packs that are gone; with 0 the snapshot can be recovered."""


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was found in a store."""

    findings: tuple[Finding, ...]
    orphans: tuple[Orphan, ...]
    num_snapshots: int
    """Refs and tags, all versions."""
    num_packs: int
    """That a snapshot needs."""
    num_chunks: int
    """In them, as far as their footers can be read."""
    bytes_read: int
    """Of packs, read whole; 0 unless the survey is a deep one."""

    @property
    def ok(self) -> bool:
        """Whether all is as it must be: index objects may be missing, which only costs later saves some bytes."""
        return all(finding.kind is Kind.INDEX for finding in self.findings)
