"""Mirroring carried out: packs, then the manifest, then the ref of one snapshot after another, as a save writes them.

Every object keeps its name and its bytes, so the copy can be named as ``mirror=`` of the store and heals it, and a call
that was interrupted goes on where it ended: what is there is not copied again, whoever brought it. Every byte is proven
before it is put, and every put is create-only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    FormatError,
    ObjectNotFoundError,
    StoreNotFoundError,
)
from vescale_ckpt.execute.hints import put_hints
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest
from vescale_ckpt.execute.whole_pack import WholePack, damaged_entries, read_whole_pack
from vescale_ckpt.mirroring.plan import MirrorPlan, SnapshotCopy, plan_mirror
from vescale_storage import loop, refs
from vescale_storage.budget import Budget
from vescale_storage.collect.marks import Marked, refused
from vescale_storage.collect.plan import Tally
from vescale_storage.digest import hexdigest
from vescale_storage.keys import PACKS_PREFIX, manifest_key, pack_key, parse_pack_key, ref_key
from vescale_storage.pack import Pack, put_pack
from vescale_storage.parallel import map_bounded
from vescale_storage.sealed import put_once

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vescale_ckpt.store import Store
    from vescale_storage.backend import Backend
    from vescale_storage.keys import RefKey
    from vescale_storage.refs import Ref, Tag

BUDGET_BYTES: Final = 512 << 20
"""Packs in memory at once, unless a single one is more."""
_NUM_PACKS: Final = 8
"""Copied at once."""


@dataclass(slots=True)
class Mirrored:
    """What mirroring found and did."""

    plan: MirrorPlan
    dry_run: bool
    packs: Tally = field(default_factory=Tally)
    """That were copied."""
    snapshots: list[str] = field(default_factory=list)
    """That the target has now."""
    tags: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Snapshots that could not be copied, and why; the target has nothing that refers to them."""
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the target has all that was asked for."""
        return not (self.failed or self.plan.conflicts or self.plan.held_back)


def mirror_store(
    source: Store,
    target: Store,
    *,
    runs: Collection[str] = (),
    dry_run: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Mirrored:
    """Make the newest version of every snapshot, and every tag, of a store be in another one too.

    Nothing is deleted in the target; savers, loaders and collections may be at work in both meanwhile.

    Args:
        source: is only read.
        target: is made if nothing is there.
        runs: whose snapshots; all for none.
        dry_run: only plan.
        progress: called with the bytes of each pack that is done.

    Raises:
        SnapshotNotFoundError: the source has no such run.
        FormatError: a ref or tag of the source is damaged, so nobody can tell what it is.
        StorageError: either storage failed; the next call goes on.
    """
    mirroring = Mirroring(source, target)
    plan = mirroring.plan(runs, dry_run=dry_run)
    return Mirrored(plan, dry_run=True) if dry_run else mirroring.execute(plan, progress)


class Mirroring:
    """One mirroring, planned and then carried out; see ``mirror_store``."""

    def __init__(self, source: Store, target: Store) -> None:
        self._source = source
        self._target = target
        self._progress: Callable[[int], None] = _ignore
        self._began = time.monotonic()
        self._budget = Budget(BUDGET_BYTES)

    # ---- looking

    def plan(self, runs: Collection[str] = (), *, dry_run: bool = False) -> MirrorPlan:
        """Look at both stores and return what to do.

        Raises:
            SnapshotNotFoundError, FormatError, StorageError: as ``mirror_store``.
        """
        self._source.require()
        is_there = True
        try:
            self._target.require(create=not dry_run)
        except StoreNotFoundError:
            is_there = False
        # As for a save: marks first, then what is there to be referred to.
        marked = loop.run(self._target.marks.marked()) if is_there else Marked()
        names = list(dict.fromkeys(runs)) or self._source.runs()
        wanted: dict[str, Ref] = {}
        tags: list[Tag] = []
        for name in names:
            self._source.snapshots(name)  # says what there is, where there is no such run
            mine = loop.run(refs.list_tags(self._source.backend, name))
            newest = loop.run(refs.list_refs(self._source.backend, name))
            wanted.update({ref.key: ref for ref in (*newest, *(tag.ref for tag in mine))})
            tags += mine
        there, tags_there = loop.run(self._there(names)) if is_there else ({}, {})
        missing = [ref for key, ref in wanted.items() if key not in there]
        return plan_mirror(
            list(wanted.values()),
            tags,
            {ref.manifest: self._packs_of(ref) for ref in missing},
            there=there,
            tags_there=tags_there,
            packs_there=loop.run(self._packs()) if is_there else {},
            marked=marked,
        )

    def _packs_of(self, ref: Ref) -> dict[str, int]:
        manifest = open_manifest(fetch_manifest(self._source.reading, ref), ref)
        return {pack.name: pack.size_bytes for pack in manifest.packs}

    async def _there(self, runs: Collection[str]) -> tuple[dict[str, Ref | None], dict[str, Tag | None]]:
        """Return the target's refs and tags by key."""
        backend = self._target.backend
        found: dict[str, Ref | None] = {}
        tags: dict[str, Tag | None] = {}

        async def read(key: RefKey) -> None:
            name = ref_key(*key)
            try:
                found[name] = await refs.read_ref_version(backend, *key)
            except FormatError:
                found[name] = None
            except ObjectNotFoundError:
                pass

        for run in runs:
            await map_bounded(read, await refs.list_ref_keys(backend, run), _NUM_PACKS)
            tags.update({tag.key: tag for tag in await refs.list_tags(backend, run)})
        return found, tags

    async def _packs(self) -> dict[str, int]:
        found: dict[str, int] = {}
        async for info in self._target.backend.list(PACKS_PREFIX):
            try:
                found[parse_pack_key(info.key)] = info.size_bytes
            except FormatError:
                continue
        return found

    # ---- copying

    def execute(self, plan: MirrorPlan, progress: Callable[[int], None] | None = None) -> Mirrored:
        """Copy what this one's plan says, one snapshot after another.

        Raises:
            StorageError: either storage failed; the next call goes on.
        """
        self._progress = progress or _ignore
        result = Mirrored(plan, dry_run=False)
        gone: set[str] = set()
        for copy in result.plan.copies:
            name = f"{copy.ref.run}@{copy.ref.step}"
            try:
                loop.run(self._copy_packs(copy, result))
                self._commit(copy.ref, gone)
            except (CorruptionError, ConflictError, ObjectNotFoundError) as error:
                result.failed.append(f"{name}: {error.message}")
                gone |= copy.packs.keys()  # those that did come are found by the next call
            else:
                result.snapshots.append(name)
        self._set_tags(result)
        result.seconds = time.monotonic() - self._began
        return result

    def _set_tags(self, result: Mirrored) -> None:
        for tag in result.plan.tags:
            if not self._is_committed(tag.ref):
                continue  # its snapshot could not be copied
            data = refs.encode_tag(tag)
            if loop.run(put_once(self._target.backend, tag.key, data)) == data:
                result.tags.append(f"{tag.ref.run}@{tag.name}")
            else:
                result.failed.append(f"{tag.ref.run}@{tag.name}: somebody has set it meanwhile")

    def _is_committed(self, ref: Ref) -> bool:
        try:
            loop.run(self._target.backend.head(ref.key))
        except ObjectNotFoundError:
            return False
        return True

    async def _copy_packs(self, copy: SnapshotCopy, result: Mirrored) -> None:
        async def one(item: tuple[str, int]) -> None:
            name, size = item
            async with self._budget.take(size):
                if await _copy_pack(self._source.reading, self._target.backend, name, size):
                    result.packs += Tally(1, size)
            self._progress(size)

        await map_bounded(one, copy.packs.items(), _NUM_PACKS)

    def _commit(self, ref: Ref, gone: Collection[str]) -> None:
        """Put the manifest and then the ref, which makes the snapshot visible in the target."""
        data = fetch_manifest(self._source.reading, ref)
        manifest = open_manifest(data, ref)
        backend = self._target.backend
        missing = [pack.name for pack in manifest.packs if pack.name in gone]
        if missing:
            raise CorruptionError(f"{len(missing)} of its packs could not be copied for a snapshot before it")
        loop.run(_put_manifest(backend, ref.manifest, data))
        marks, unreadable = loop.run(self._target.marks.marks())
        names = [pack.name for pack in manifest.packs]
        if unreadable or refused(marks, names, time.monotonic() - self._began):
            raise ConflictError("a collection of the target has marked its packs meanwhile; call again")
        for pack in manifest.packs:  # the last look: nobody may have deleted what was there at the first
            loop.run(backend.head(pack_key(pack.name)))
        there = loop.run(put_once(backend, ref.key, refs.encode_ref(ref)))
        if refs.decode_ref(there, ref.key).manifest != ref.manifest:
            raise ConflictError(f"somebody has saved version {ref.version} of it in the target meanwhile")
        put_hints(backend, manifest, ref.manifest)


async def _copy_pack(source: Backend, target: Backend, name: str, size_bytes: int) -> bool:
    """Copy a pack, all of it proven first; return False where it is there already."""
    for number, copy in enumerate(source.copies()):
        try:
            whole = await _sound_pack(copy, name, size_bytes)
        except (CorruptionError, ObjectNotFoundError):
            if number + 1 == len(source.copies()):
                raise
        else:
            return await put_pack(target, Pack(name, [whole.body], size_bytes, whole.entries))
    return False


async def _sound_pack(backend: Backend, name: str, size_bytes: int) -> WholePack:
    whole = await read_whole_pack(backend, name, size_bytes)
    damaged = await loop.run_blocking(damaged_entries, whole.body, whole.entries)
    if damaged:
        raise CorruptionError(f"{len(damaged)} chunks of {pack_key(name)!r} in {backend.url} are damaged", pack=name)
    return whole


async def _put_manifest(target: Backend, name: str, data: bytes) -> None:
    key = manifest_key(name)
    try:
        await target.put_if_absent(key, [data])
    except AlreadyExistsError:
        if await loop.run_blocking(hexdigest, await target.get(key)) != name:  # a damaged one is in the way
            await target.put(key, [data])


def _ignore(num_bytes: int) -> None:
    """Take a report of progress and do nothing with it."""
