"""The store's collection, told what manifests refer to; with repacking, if that is asked for, before it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.collecting.repack import Repacked, Repacker
from vescale_ckpt.errors import UnsupportedVersionError
from vescale_ckpt.format.document import decode_document
from vescale_ckpt.format.kinds import Kind
from vescale_ckpt.format.manifest import MAGIC, WHAT
from vescale_ckpt.format.packs import decode_packs
from vescale_ckpt.format.records import FORMAT_VERSION
from vescale_storage import loop, root
from vescale_storage.collect.marks import DEFAULT_GRACE_SECONDS
from vescale_storage.collect.roots import RootReader
from vescale_storage.collect.sweep import Collection, Collector, storage_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_storage.backend import Backend
    from vescale_storage.collect.gc_objects import MarkReader


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one collection of a store found and did."""

    collection: Collection
    """Its ``plan`` and what was ``done``."""
    repacked: Repacked | None
    """None where that was not asked for."""
    dry_run: bool


def packs_of(data: bytes) -> list[str]:
    """Return the names of the packs that a manifest refers to; nothing else of it is decoded.

    Raises:
        FormatError: it is no manifest, or is damaged.
        UnsupportedVersionError: a newer writer made it.
    """
    document = decode_document(data, magic=MAGIC, version=FORMAT_VERSION, what=WHAT, known=frozenset(Kind))
    return [pack.name for pack in decode_packs(document, Kind.PACK_NAME, Kind.PACK_SIZE)]


def collect_garbage(
    backend: Backend,
    marks: MarkReader,
    *,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    dry_run: bool = False,
    repack: bool = False,
    now: float | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> GcReport:
    """Delete, or mark for deletion, what no ref and no tag leads to; see ``Store.gc``.

    Raises:
        UnsupportedVersionError: the store, or something in it, is of a newer version.
        CorruptionError, FormatError: a root cannot be read; nothing was deleted.
        StorageError: the storage failed.
    """
    _refuse_newer(backend)
    if now is None:
        now = time.time() if dry_run else loop.run(storage_clock(backend))
    roots = RootReader(backend, packs_of)
    collector = Collector(backend, roots, grace_seconds=grace_seconds, now=now, progress=progress)
    repacked = None
    if repack:
        repacker = Repacker(
            backend, roots, marks, grace_seconds=grace_seconds, now=now, progress=progress or (lambda _what, _num: None)
        )
        repacked = repacker.repack(dry_run=dry_run)
    return GcReport(loop.run(collector.collect(dry_run=dry_run)), repacked, dry_run)


def _refuse_newer(backend: Backend) -> None:
    """Refuse a store of a newer minor version: its readers can ignore what it adds, but who deletes cannot."""
    found = loop.run(root.create_or_open_root(backend, create=False, read_only=True)).version
    if found > root.STORE_VERSION:
        raise UnsupportedVersionError(
            f"cannot collect in {backend.url}: the store has version {found[0]}.{found[1]}, this program knows "
            f"{root.STORE_VERSION[0]}.{root.STORE_VERSION[1]} and cannot tell what else needs its objects; upgrade "
            "vescale-ckpt",
            found=found,
            supported=root.STORE_VERSION,
        )
