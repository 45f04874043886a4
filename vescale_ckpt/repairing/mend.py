"""Mending: what a survey found made right, as far as something is left to make it from."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vescale_ckpt.errors import ConflictError, CorruptionError, InternalError, NotFoundError, ObjectNotFoundError
from vescale_ckpt.execute.hints import put_hints
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest
from vescale_ckpt.format.manifest import manifest_name
from vescale_ckpt.repairing.assemble import Assembler
from vescale_ckpt.repairing.findings import (
    CopyManifest,
    DropRef,
    PutIndex,
    PutRoot,
    RebuildPack,
    ReplaceRef,
    RestoreRef,
)
from vescale_storage import loop, refs
from vescale_storage.collect.gc_objects import MarkReader
from vescale_storage.digest import HASH_NAME
from vescale_storage.keys import PACKS_PREFIX, STORE_KEY, manifest_key, pack_key, ref_key
from vescale_storage.root import STORE_VERSION, Root, encode_root

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vescale_ckpt.repairing.findings import Finding, Fix, Orphan, Survey
    from vescale_storage.backend import Backend
    from vescale_storage.refs import Ref


@dataclass(slots=True)
class Mended:
    """What was made right."""

    done: list[Finding] = field(default_factory=list)
    failed: list[tuple[Finding, str]] = field(default_factory=list)
    """With why; what they were about is as it was."""


def mend_store(
    backend: Backend,
    survey: Survey,
    *,
    mirrors: Sequence[Backend] = (),
    progress: Callable[[str, int], None] | None = None,
) -> Mended:
    """Do what a survey said that can be done; nothing that is sound is touched.

    Savers and loaders may be at work meanwhile; a collection should not.

    Raises:
        StorageError: the storage failed; what was done stays done.
    """
    mender = _Mender(backend, mirrors)
    result = Mended()
    for finding in survey.findings:
        if finding.fix is None:
            continue
        try:
            mender.apply(finding.fix)
        except (CorruptionError, ConflictError, NotFoundError) as error:
            result.failed.append((finding, error.message))
        else:
            result.done.append(finding)
        if progress is not None:
            progress("objects mended", len(result.done))
    return result


def recover(backend: Backend, orphan: Orphan) -> Ref:
    """Commit a manifest that nothing leads to, as the next version of its step, and return the ref.

    Raises:
        CorruptionError: some of its packs are gone.
        ConflictError: a collection is about to delete what it needs.
        StorageError: the storage failed.
    """
    if orphan.num_missing:
        raise CorruptionError(
            f"cannot recover {orphan.run}@{orphan.step} from manifest {orphan.name[:16]}: {orphan.num_missing} of its "
            f"{orphan.num_packs} packs are gone",
            manifest=orphan.name,
        )
    ref = refs.Ref(orphan.run, orphan.step, 1, orphan.name, orphan.transaction, orphan.created_seconds)
    manifest = open_manifest(fetch_manifest(backend, ref), ref)
    marks, unreadable = loop.run(MarkReader(backend).marks())
    packs = {pack.name for pack in manifest.packs}
    if unreadable or any(orphan.name in mark.manifests or not packs.isdisjoint(mark.packs) for mark in marks):
        raise ConflictError(
            f"cannot recover {orphan.run}@{orphan.step}: a collection has marked it and may delete it at any moment; "
            "copy the store's objects away now, or take the mark under gc/ away if you know that no collection runs",
            manifest=orphan.name,
        )
    # A transaction of its own: that of a version which was deleted may still be asked for by a rank of its save.
    return loop.run(
        refs.create_ref(
            backend,
            orphan.run,
            orphan.step,
            manifest=orphan.name,
            transaction=os.urandom(16).hex(),
            now=orphan.created_seconds,
        )
    )


class _Mender:
    def __init__(self, backend: Backend, mirrors: Sequence[Backend]) -> None:
        self._backend = backend
        self._mirrors = mirrors
        self._assembler: Assembler | None = None

    def apply(self, fix: Fix) -> None:
        """Do one thing."""
        match fix:
            case PutRoot():
                fresh = Root(os.urandom(16).hex(), STORE_VERSION, HASH_NAME, time.time())
                loop.run(self._backend.put(STORE_KEY, [encode_root(fresh)]))
            case RestoreRef(ref):
                loop.run(self._backend.put(ref.key, [refs.encode_ref(ref)]))
            case ReplaceRef():
                self._replace(fix)
            case DropRef(damaged):
                loop.run(self._backend.delete(ref_key(*damaged)))
            case CopyManifest(name):
                self._copy_manifest(name)
            case RebuildPack():
                self._rebuild(fix)
            case PutIndex(ref):
                put_hints(self._backend, open_manifest(fetch_manifest(self._backend, ref), ref), ref.manifest)
            case _:
                raise InternalError(f"no way to do {fix!r}")

    def _replace(self, fix: ReplaceRef) -> None:
        """Commit first, and then delete: whenever this dies, the step is damaged or whole, never gone."""
        run, step, _ = fix.damaged
        loop.run(
            refs.create_ref(
                self._backend, run, step, manifest=fix.manifest, transaction=fix.transaction, now=fix.created_seconds
            )
        )
        loop.run(self._backend.delete(ref_key(*fix.damaged)))

    def _copy_manifest(self, name: str) -> None:
        key = manifest_key(name)
        for mirror in self._mirrors:
            try:
                data = loop.run(mirror.get(key))
            except ObjectNotFoundError:
                continue
            if manifest_name(data) == name:
                loop.run(self._backend.put(key, [data]))
                return
        raise CorruptionError(f"no mirror has {key} whole any more", key=key)

    def _rebuild(self, fix: RebuildPack) -> None:
        assembler = self._assembler or Assembler(self._backend, self._mirrors, loop.run(self._packs()))
        self._assembler = assembler
        body, lost = loop.run(assembler.assemble(fix.name, fix.size_bytes, fix.entries))
        if lost:
            raise CorruptionError(f"{len(lost)} chunks of {pack_key(fix.name)} are in no sound copy any more")
        loop.run(self._backend.put(pack_key(fix.name), [body]))

    async def _packs(self) -> dict[str, int]:
        return {info.key.rpartition("/")[2]: info.size_bytes async for info in self._backend.list(PACKS_PREFIX)}
