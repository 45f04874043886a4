"""The store: runs and their snapshots at one URL, and reading any of it without a process group."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vescale_ckpt.collecting.gc import GcReport, collect_garbage
from vescale_ckpt.errors import (
    ConfigError,
    RefNotFoundError,
    SnapshotNotFoundError,
    StoreNotFoundError,
)
from vescale_ckpt.execute.heal import HealReport, heal_snapshot
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest
from vescale_ckpt.pruning import Deleted, Pruned, delete_snapshot, prune_run
from vescale_ckpt.snapshot import Snapshot
from vescale_storage import loop, refs, root
from vescale_storage.backends import open_backend, probe_conditional_put
from vescale_storage.collect.gc_objects import MarkReader
from vescale_storage.collect.marks import DEFAULT_GRACE_SECONDS
from vescale_storage.keys import STORE_KEY
from vescale_storage.ref_records import SnapshotName
from vescale_storage.wrappers.cache import CacheBackend
from vescale_storage.wrappers.count import Counters, CountingBackend
from vescale_storage.wrappers.mirror import MirrorBackend
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.retention import RetentionPolicy
    from vescale_storage.backend import Backend
    from vescale_storage.refs import Ref, Tag
    from vescale_storage.wrappers.count import Counts

_MANIFESTS_KEPT = 4
DEFAULT_CACHE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One committed snapshot in a listing."""

    run: str
    step: int
    version: int
    created_seconds: float
    """Seconds since the epoch."""
    tags: tuple[str, ...]

    @property
    def name(self) -> str:
        """``run@step``."""
        return f"{self.run}@{self.step}"


@dataclass(frozen=True, slots=True)
class TagInfo:
    """A tag and what it names."""

    run: str
    name: str
    step: int
    version: int
    created_seconds: float
    """When it was set; seconds since the epoch."""

    @classmethod
    def of(cls, tag: Tag) -> TagInfo:
        """Return what a stored tag says."""
        return cls(tag.ref.run, tag.name, tag.ref.step, tag.ref.version, tag.created_seconds)


class Store:
    """Runs and snapshots at one URL. Safe for threads; made by ``open_store``."""

    def __init__(
        self,
        backend: Backend,
        *,
        exists: bool,
        unsafe_no_conditional_put: bool = False,
        counters: Counters | None = None,
        reading: Backend | None = None,
    ) -> None:
        self.backend = backend
        """The store itself: what is written, and what is believed of it."""
        self._reading = reading
        self._counters = counters
        self._exists = exists
        self._unsafe = unsafe_no_conditional_put
        self.marks = MarkReader(backend)
        """What collections are going to delete, for who writes."""
        self._manifests: dict[str, Manifest] = {}
        self._committed: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where the store is."""
        return self.backend.url

    @property
    def reading(self) -> Backend:
        """Where packs and manifests are read from: the store, behind its cache and beside its mirror."""
        return self._reading or self.backend

    @property
    def counts(self) -> Counts | None:
        """Requests and bytes since the store was opened; not what the cache and the mirror served."""
        return self._counters.counts() if self._counters is not None else None

    def require(self, *, create: bool = False) -> None:
        """Check that there is a store here, or make one.

        Raises:
            StoreNotFoundError: there is none and ``create`` is false.
            ConfigError: the storage ignores create-only puts, as old S3 servers do.
        """
        if not self._exists:
            loop.run(_open_root(self.backend, create=create, unsafe=self._unsafe))
            self._exists = True

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        self.require()
        return sorted(loop.run(refs.list_runs(self.backend)))

    def snapshots(self, run: str) -> list[SnapshotInfo]:
        """Return the committed snapshots of a run, by step; of a step saved several times, the newest.

        Raises:
            SnapshotNotFoundError: the run has none.
        """
        self.require()
        listed = loop.run(refs.list_refs(self.backend, run))
        if not listed:
            raise SnapshotNotFoundError(self._nothing(SnapshotName(run)), run=run)
        tags: dict[int, list[str]] = {}
        for tag in loop.run(refs.list_tags(self.backend, run)):
            tags.setdefault(tag.ref.step, []).append(tag.name)
        return [
            SnapshotInfo(run, ref.step, ref.version, ref.created_seconds, tuple(sorted(tags.get(ref.step, ()))))
            for ref in sorted(listed, key=lambda ref: ref.step)
        ]

    def __getitem__(self, name: str) -> Snapshot:
        """Return the snapshot ``run@step``, ``run@tag``, or the newest of ``run``.

        Raises:
            SnapshotNotFoundError: there is none; the message lists what there is.
        """
        return Snapshot(self, self.resolve(refs.parse_name(name)))

    def resolve(self, name: SnapshotName) -> Ref:
        """Return the ref of a step, a tag, or the newest step.

        Raises:
            SnapshotNotFoundError: there is none; the message lists what there is.
        """
        self.require()
        try:
            return loop.run(refs.resolve(self.backend, name))
        except RefNotFoundError as error:
            raise SnapshotNotFoundError(self._nothing(name), run=name.run) from error

    def newest(self, run: str) -> Ref | None:
        """Return the ref of a run's highest step, or None where it has none."""
        try:
            return loop.run(refs.latest_ref(self.backend, run))
        except RefNotFoundError:
            return None

    def manifest(self, ref: Ref) -> Manifest:
        """Return the manifest that a ref points to; the last few are kept, for they never change."""
        with self._lock:
            known = self._manifests.pop(ref.manifest, None)
        manifest = known or open_manifest(fetch_manifest(self.reading, ref), ref)
        self.keep(ref, manifest)
        return manifest

    def keep(self, ref: Ref, manifest: Manifest) -> None:
        """Remember a manifest that was read or written."""
        with self._lock:
            self._manifests[ref.manifest] = manifest
            while len(self._manifests) > _MANIFESTS_KEPT:
                self._manifests.pop(next(iter(self._manifests)))

    # ---- what stays and what goes

    def tag(self, run: str, step: int, name: str) -> TagInfo:
        """Name the newest version of ``run@step``; the same again changes nothing.

        A tagged snapshot is neither deleted nor pruned.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.
            ConflictError: the tag is on another one: tags do not move.
            ConfigError: a name is none.
        """
        self.require()
        try:
            return TagInfo.of(loop.run(refs.set_tag(self.backend, run, name, step, now=time.time())))
        except RefNotFoundError as error:
            raise SnapshotNotFoundError(self._nothing(SnapshotName(run, step)), run=run, step=step) from error

    def untag(self, run: str, name: str) -> None:
        """Take a tag away; its snapshot stays, until it is deleted or pruned.

        Raises:
            SnapshotNotFoundError: there is no such tag.
        """
        self.require()
        try:
            loop.run(refs.delete_tag(self.backend, run, name))
        except RefNotFoundError as error:
            raise SnapshotNotFoundError(str(error), run=run, tag=name) from error

    def tags(self, run: str) -> list[TagInfo]:
        """Return the tags of a run, by name."""
        self.require()
        return [TagInfo.of(tag) for tag in loop.run(refs.list_tags(self.backend, run))]

    def delete(self, run: str, step: int, *, dry_run: bool = False) -> Deleted:
        """Delete a snapshot, all its versions; its data stay until ``gc`` finds that nothing else needs them.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.
            ConflictError: it is tagged.
        """
        self.require()
        return loop.run(delete_snapshot(self.backend, run, step, dry_run=dry_run))

    def prune(
        self,
        run: str,
        policy: RetentionPolicy,
        *,
        keep_steps: Collection[int] = (),
        dry_run: bool = False,
        now: float | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> Pruned:
        """Delete the snapshots of a run that a policy does not keep, and versions that were superseded an hour ago.

        Saves under way are not snapshots: they neither count nor are they touched.

        Args:
            run: which run.
            policy: what stays; tagged ones and the newest always do.
            keep_steps: stay as well.
            dry_run: only plan.
            now: seconds since the epoch.
            progress: called with what is being done and how many of them are done.

        Raises:
            SnapshotNotFoundError: the run has no snapshot.
            FormatError: a tag is damaged, so nobody can tell what it keeps; nothing was deleted.
        """
        self.require()
        pruned = loop.run(
            prune_run(
                self.backend,
                run,
                policy,
                now=time.time() if now is None else now,
                keep_steps=keep_steps,
                known=self._committed,
                dry_run=dry_run,
                progress=progress,
            )
        )
        if not (pruned.plan.kept or pruned.plan.deleted):
            raise SnapshotNotFoundError(self._nothing(SnapshotName(run)), run=run)
        return pruned

    def gc(
        self,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        *,
        dry_run: bool = False,
        repack: bool = False,
        now: float | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> GcReport:
        """Collect what no snapshot and no tag needs: mark it, and delete what was marked a grace period ago.

        So a first call only marks, and one a grace period later deletes. Any number of savers, loaders and other
        collections may be at work meanwhile, as long as no save takes half the grace period.

        Args:
            grace_seconds: at least twice as long as the longest save, of which ``SaveOptions.deadline_seconds`` is only
                one wait. 0 deletes at once, which is right only where nobody else uses the store.
            dry_run: only plan; writes nothing.
            repack: also rewrite packs of which less than half is needed.
            now: seconds since the epoch; None asks the storage's own clock.
            progress: called with what is being done and how many of them are done.

        Raises:
            CorruptionError, FormatError: a ref, tag, manifest or pack that is needed is damaged or gone; nothing was
                deleted.
            UnsupportedVersionError: a newer writer uses the store; likewise.
        """
        self.require()
        return collect_garbage(
            self.backend,
            self.marks,
            grace_seconds=grace_seconds,
            dry_run=dry_run,
            repack=repack,
            now=now,
            progress=progress,
        )

    def heal(self, name: str, progress: Callable[[int], None] | None = None) -> HealReport:
        """Check all objects of a snapshot in the store, and write anew from the mirror what is missing or damaged.

        Loads read around damage by themselves; this is what ends it.

        Args:
            name: ``run@step``, ``run@tag``, or a run, of which the newest.
            progress: called with the size of each pack that was checked.

        Raises:
            ConfigError: the store was opened without a mirror.
            SnapshotNotFoundError: there is no such snapshot.
            CorruptionError: no copy has its manifest whole.
        """
        copies = self.reading.copies()
        if len(copies) < 2:
            raise ConfigError(f"cannot heal '{name}' in {self.url}: open the store with mirror=, the URL of its copy")
        report = heal_snapshot(copies, self.resolve(refs.parse_name(name)), progress)
        for key in report.healed:
            loop.run(self.reading.forget(key))
        return report

    def close(self) -> None:
        """Release connections and threads."""
        loop.run(self.reading.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _nothing(self, name: SnapshotName) -> str:
        at = name.tag if name.tag is not None else name.step
        wanted = f"'{name.run}@{at}'" if at is not None else f"any snapshot of run '{name.run}'"
        steps = sorted({key.step for key in loop.run(refs.list_ref_keys(self.backend, name.run))})
        if steps:
            shown = ", ".join(str(step) for step in steps[-8:])
            more = "... " if len(steps) > 8 else ""
            return f"cannot find {wanted} in {self.url}: the run has the steps {more}{shown}"
        runs = loop.run(refs.list_runs(self.backend))
        there = f"its runs are {', '.join(repr(run) for run in runs[:8])}" if runs else "the store is empty"
        return f"cannot find {wanted} in {self.url}: {there}"


def open_store(  # noqa: PLR0913 - each names a place, or how to treat it
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    create: bool = True,
    retry: RetryPolicy | None = None,
    unsafe_no_conditional_put: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    mirror: str | os.PathLike[str] | None = None,
    mirror_storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """Return the store at a local path or any fsspec URL (``s3://bucket/prefix``, ``memory://name``, ...).

    Args:
        url: where the store is or will be.
        storage_options: passed to the file system (key, secret, endpoint_url, ...).
        create: whether a store may be made here; it is made by the first save, never by a read.
        retry: how patient to be with a failing back end.
        unsafe_no_conditional_put: accept a back end that cannot create objects exclusively. Two writers of the same
            step may then overwrite each other.
        cache_dir: a folder on local disk that keeps what loads have read, for all processes and stores of this host.
        cache_bytes: how much the folder may hold; what was used longest ago goes first.
        mirror: URL of a copy of the store. Loads read from it what is missing or damaged here; see ``Store.heal``.
        mirror_storage_options: as ``storage_options``, for the mirror.

    Raises:
        StoreNotFoundError: there is no store here and ``create`` is false.
        ConfigError: there is something else here, or an option is wrong.
        StorageError: the place cannot be reached.
    """
    policy = retry or RetryPolicy()
    counters = Counters()
    counted = CountingBackend(open_backend(url, storage_options), counters)
    backend = RetryBackend(counted, policy, on_retry=counters.add_retry)
    reading: Backend = backend
    if mirror is not None:
        reading = MirrorBackend(reading, RetryBackend(open_backend(mirror, mirror_storage_options), policy))
    if cache_dir is not None:
        reading = CacheBackend(reading, cache_dir, cache_bytes)
    try:
        loop.run(_open_root(backend, create=False, unsafe=unsafe_no_conditional_put))
        exists = True
    except StoreNotFoundError:
        exists = False
        if not create:
            loop.run(backend.close())
            raise
    except BaseException:
        loop.run(backend.close())
        raise
    return Store(
        backend,
        exists=exists,
        unsafe_no_conditional_put=unsafe_no_conditional_put,
        counters=counters,
        reading=reading,
    )


async def _open_root(backend: Backend, *, create: bool, unsafe: bool) -> None:
    """Open the store behind a back end, or make one where the storage keeps its word about create-only puts."""
    try:
        await root.create_or_open_root(backend, create=False, unsafe_no_conditional_put=unsafe)
    except StoreNotFoundError:
        if not create:
            raise
    else:
        return
    await root.create_or_open_root(backend, create=True, unsafe_no_conditional_put=unsafe)
    if unsafe or await probe_conditional_put(backend):
        return
    await backend.delete(STORE_KEY)
    raise ConfigError(
        f"cannot make a store at {backend.url}: the server takes create-only puts and ignores the condition, so two "
        "savers could overwrite each other's ref; use one that has conditional writes, or, if never more than one "
        "process saves there, pass unsafe_no_conditional_put=True"
    )
