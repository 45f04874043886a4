"""The survey: every object of a store read and held against the others; what is wrong, and what could mend it.

It needs no store that opens: it is for those that do not. Nothing is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import (
    CorruptionError,
    FormatError,
    ObjectNotFoundError,
    UnsupportedVersionError,
)
from vescale_ckpt.execute.hints import encode_hints
from vescale_ckpt.format.manifest import decode_manifest, manifest_name
from vescale_ckpt.repairing.findings import (
    CopyManifest,
    DropRef,
    Finding,
    Kind,
    Orphan,
    PutIndex,
    PutRoot,
    ReplaceRef,
    RestoreRef,
    Survey,
)
from vescale_ckpt.repairing.pack_survey import PackSurvey
from vescale_ckpt.repairing.pack_table import PackTable
from vescale_storage import loop, root
from vescale_storage.keys import (
    INDEX_PREFIX,
    MANIFESTS_PREFIX,
    PACKS_PREFIX,
    REFS_PREFIX,
    STORE_KEY,
    index_key,
    manifest_key,
    parse_manifest_key,
    parse_pack_key,
    parse_ref_key,
    parse_tag_key,
    ref_key,
)
from vescale_storage.refs import Ref, Tag, decode_ref, decode_tag
from vescale_storage.sealed import read_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vescale_ckpt.format.records import Manifest
    from vescale_storage.backend import Backend, ObjectInfo
    from vescale_storage.keys import RefKey


def survey_store(
    backend: Backend,
    *,
    mirrors: Sequence[Backend] = (),
    deep: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> Survey:
    """Return what is wrong in a store.

    Args:
        backend: where it is.
        mirrors: copies of it, from which what is lost may be taken.
        deep: read every byte of every pack, also of chunks and packs that no snapshot needs.
        progress: called with what is being looked at and how many of them are done.

    Raises:
        ConfigError: something else than a store is there, or nothing.
        UnsupportedVersionError: a newer writer made it.
        StorageError: the storage failed.
    """
    return _Surveyor(backend, mirrors, deep=deep, progress=progress or (lambda _what, _number: None)).survey()


class _Surveyor:
    def __init__(
        self, backend: Backend, mirrors: Sequence[Backend], *, deep: bool, progress: Callable[[str, int], None]
    ) -> None:
        self._backend = backend
        self._mirrors = mirrors
        self._deep = deep
        self._progress = progress
        self._findings: list[Finding] = []
        self._refs: list[Ref] = []
        self._tags: list[Tag] = []
        self._bad_refs: dict[RefKey, str] = {}
        self._table = PackTable()

    def survey(self) -> Survey:
        """Look at everything."""
        self._look_at_root()
        self._look_at_records()
        holders = self._holders()
        listed = {info.key: info for info in self._list(MANIFESTS_PREFIX)}
        self._index = {info.key for info in self._list(INDEX_PREFIX)}
        for number, (name, ref) in enumerate(holders.items(), 1):
            self._look_at_manifest(name, ref)
            self._progress("manifests", number)
        packs = self._listed_packs()
        orphans = self._orphans(listed, holders, packs)
        self._judge_refs(orphans)
        found = PackSurvey(self._backend, self._mirrors, self._table, packs, deep=self._deep, progress=self._progress)
        self._findings += found.look()
        return Survey(
            tuple(self._findings),
            tuple(orphans),
            num_snapshots=len(self._refs) + len(self._tags),
            num_packs=len(self._table.sizes),
            num_chunks=found.num_chunks,
            bytes_read=found.bytes_read,
        )

    def _list(self, prefix: str) -> list[ObjectInfo]:
        async def listed() -> list[ObjectInfo]:
            return [info async for info in self._backend.list(prefix)]

        return loop.run(listed())

    def _add(self, kind: Kind, key: str, problem: str, outlook: str, **rest: Any) -> None:
        self._findings.append(Finding(kind=kind, key=key, problem=problem, outlook=outlook, **rest))

    # ---- root, refs and tags

    def _look_at_root(self) -> None:
        try:
            loop.run(root.create_or_open_root(self._backend, create=False, read_only=True))
        except UnsupportedVersionError:
            raise
        except FormatError as error:
            outlook = "a new one is written; nothing in a store depends on the id and time that the old one had"
            self._add(Kind.ROOT, STORE_KEY, error.message, outlook, fix=PutRoot())

    def _look_at_records(self) -> None:
        for info in self._list(REFS_PREFIX):
            try:
                self._look_at_record(info)
            except ObjectNotFoundError:
                continue  # deleted meanwhile

    def _look_at_record(self, info: ObjectInfo) -> None:
        what = _kind_of(info.key)
        if what is None:
            outlook = "nothing: find out what put it there and remove it; as long as it is there, gc deletes nothing"
            self._add(Kind.STRANGE, info.key, "it is neither a ref nor a tag", outlook)
            return
        try:
            if what is Kind.TAG:
                self._tags.append(loop.run(read_listed(self._backend, info, decode_tag)))
            else:
                self._refs.append(loop.run(read_listed(self._backend, info, decode_ref)))
        except UnsupportedVersionError:
            raise
        except FormatError as error:
            if what is Kind.REF:
                self._bad_refs[parse_ref_key(info.key)] = error.message
                return
            outlook = "nothing: only it knew which step it was on; take it away with 'tag --delete' and set it again"
            self._add(Kind.TAG, info.key, error.message, outlook)

    def _judge_refs(self, orphans: list[Orphan]) -> None:
        """Say what becomes of damaged refs, once it is known which manifests nothing leads to."""
        for key, problem in self._bad_refs.items():
            name = f"{key.run}@{key.step}"
            fix, outlook = self._fix_of(key, orphans)
            self._add(Kind.REF, ref_key(*key), problem, outlook, fix=fix, snapshots=(name,))

    def _fix_of(self, key: RefKey, orphans: list[Orphan]) -> tuple[RestoreRef | DropRef | ReplaceRef | None, str]:
        kept = [tag.ref for tag in self._tags if (tag.ref.run, tag.ref.step, tag.ref.version) == tuple(key)]
        if kept:
            return RestoreRef(kept[0]), "it is written again as a tag has kept it"
        mine = [ref.version for ref in self._refs if (ref.run, ref.step) == (key.run, key.step)]
        if max(mine, default=0) > key.version:
            return DropRef(key), f"version {max(mine)} has replaced it: the damaged one is deleted"
        left = [orphan for orphan in orphans if (orphan.run, orphan.step) == (key.run, key.step)]
        whole = [orphan for orphan in left if not orphan.num_missing]
        rivals = [other for other in self._bad_refs if (other.run, other.step) == (key.run, key.step)]
        if len(whole) == 1 and len(rivals) == 1:
            only = whole[0]
            fix = ReplaceRef(key, only.name, only.transaction, only.created_seconds)
            return fix, f"manifest {only.name[:16]} is the only one of this step that nothing leads to: it is committed"
        return None, f"nothing: {len(whole)} whole manifests of this step have no ref, so which one it meant is unknown"

    # ---- manifests

    def _holders(self) -> dict[str, Ref]:
        """Return manifest -> a ref that leads to it."""
        return {ref.manifest: ref for ref in (*(tag.ref for tag in self._tags), *self._refs)}

    def _look_at_manifest(self, name: str, ref: Ref) -> None:
        key = manifest_key(name)
        snapshot = f"{ref.run}@{ref.step}"
        try:
            manifest = self._manifest(name)
        except UnsupportedVersionError:
            raise
        except (FormatError, ObjectNotFoundError) as error:
            helps = self._on_mirror(key, name)
            outlook = (
                "it is written again from the mirror"
                if helps
                else "nothing: packs do not say which tensor, of which shape, a chunk is a part of; remove the snapshot"
            )
            fix = CopyManifest(name) if helps else None
            self._add(Kind.MANIFEST, key, error.message, outlook, fix=fix, snapshots=(snapshot,))
            return
        self._table.add(manifest, snapshot)
        self._look_at_index(manifest, ref)

    def _manifest(self, name: str) -> Manifest:
        data = loop.run(self._backend.get(manifest_key(name)))
        if manifest_name(data) != name:
            raise CorruptionError(f"its {len(data)} bytes do not have the digest in its name")
        return decode_manifest(data)

    def _on_mirror(self, key: str, name: str) -> bool:
        for mirror in self._mirrors:
            try:
                if manifest_name(loop.run(mirror.get(key))) == name:
                    return True
            except ObjectNotFoundError:
                continue
        return False

    def _look_at_index(self, manifest: Manifest, ref: Ref) -> None:
        key = index_key(ref.manifest)
        if not len(manifest.chunks):
            return
        problem = "it is not there"
        if key in self._index:
            try:
                if loop.run(self._backend.get(key)) == encode_hints(manifest, ref.manifest):
                    return
                problem = "it is not what its manifest makes"
            except ObjectNotFoundError:
                pass
        outlook = "it is made anew from the manifest; without it, saves of other runs do not share its chunks"
        self._add(Kind.INDEX, key, problem, outlook, fix=PutIndex(ref))

    def _orphans(self, listed: dict[str, ObjectInfo], holders: dict[str, Ref], packs: dict[str, int]) -> list[Orphan]:
        found = []
        for key in listed:
            try:
                name = parse_manifest_key(key)
            except FormatError:
                self._add(Kind.STRANGE, key, "it is no key of a manifest", "nothing: remove it")
                continue
            if name in holders:
                continue
            try:
                manifest = self._manifest(name)
            except (FormatError, ObjectNotFoundError):
                continue  # nobody needs it
            missing = [pack for pack in manifest.packs if packs.get(pack.name) != pack.size_bytes]
            found.append(
                Orphan(
                    name,
                    manifest.run,
                    manifest.step,
                    manifest.created_seconds,
                    manifest.transaction,
                    len(manifest.packs),
                    len(missing),
                )
            )
        return sorted(found, key=lambda orphan: (orphan.run, orphan.step, orphan.created_seconds))

    def _listed_packs(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for info in self._list(PACKS_PREFIX):
            try:
                found[parse_pack_key(info.key)] = info.size_bytes
            except FormatError:
                self._add(Kind.STRANGE, info.key, "it is no key of a pack", "nothing: remove it")
        return found


def _kind_of(key: str) -> Kind | None:
    for kind, parse in ((Kind.REF, parse_ref_key), (Kind.TAG, parse_tag_key)):
        try:
            parse(key)
        except FormatError:
            continue
        return kind
    return None
