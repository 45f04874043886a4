"""The background of saving: one thread that writes and commits jobs in order, without any collective."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from vescale_ckpt.errors import (
    AccessDeniedError,
    ConflictError,
    FormatError,
    NoSpaceError,
    RankFailureError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
    VeScaleError,
)
from vescale_ckpt.execute.commit import Meeting, commit
from vescale_ckpt.execute.dedup import DedupIndex
from vescale_ckpt.execute.hints import Hints
from vescale_ckpt.execute.write import WriteOptions, Writer, Written
from vescale_ckpt.saving.handle import SaveReport, SaveState
from vescale_ckpt.saving.phases import naming
from vescale_ckpt.saving.pools import Pools, make_pools
from vescale_ckpt.stage.threads import settle_torch
from vescale_ckpt.trace import write_trace
from vescale_storage import loop
from vescale_storage.digest import digest
from vescale_storage.pack import Codec

if TYPE_CHECKING:
    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.retention import RetentionPolicy
    from vescale_ckpt.saving.job import Job
    from vescale_ckpt.saving.options import SaveOptions
    from vescale_ckpt.store import Store
    from vescale_storage.collect.marks import Marked
    from vescale_storage.refs import Ref

_log = logging.getLogger(__name__)


class Background:
    """Writes and commits the jobs of one run."""

    def __init__(
        self, store: Store, run: str, group: Group, options: SaveOptions, retention: RetentionPolicy | None = None
    ) -> None:
        self._store = store
        self._run = run
        self._retention = retention
        self._rank = group.rank
        self._world_size = group.world_size
        self._options = options
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hints: Hints | None = None
        self.pools: Pools = make_pools(options.host_budget_bytes)

    def begin(self, job: Job) -> None:
        """Take a job; its parts may still be on their way."""
        if self._thread is None:
            settle_torch()
            self._thread = threading.Thread(target=self._serve, name="vescale-save", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def let_go(self) -> None:
        """Let the thread end after the jobs that it has, without waiting for it."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                report = self._attempts(job)
                self._retain(report)
                self._trace(job)
                job.handle.end(report)
            except BaseException as error:  # noqa: BLE001 -- a thread hands every error to its future
                self._trace(job)
                # What was in flight may still refer to these blocks, so they are not used again.
                self.pools = Pools(self.pools.slabs, make_pools(self._options.host_budget_bytes).blocks)
                job.handle.end(error)
            finally:
                job.parts.release()

    def _retain(self, report: SaveReport) -> None:
        """Delete the snapshots that the policy does not keep; the save is committed and does not fail by it."""
        if self._retention is None or self._rank != 0:
            return
        began = time.monotonic()
        try:
            self._store.prune(self._run, self._retention, keep_steps=(report.step,))
        except Exception as error:  # noqa: BLE001 -- whatever it is, the snapshot is there
            _log.warning("after the save of %s@%d, retention failed: %s", self._run, report.step, error)
        report.seconds["retain"] = time.monotonic() - began

    def _trace(self, job: Job) -> None:
        """Write this rank's trace where the options ask for one, also of a save that failed."""
        if self._options.trace_folder is not None:
            title = f"{self._run}@{job.handle.step} save"
            write_trace(self._options.trace_folder, job.phases, title=title, rank=self._rank)

    def _attempts(self, job: Job) -> SaveReport:
        """Run a job, and again where the policy says so and trying again can help.

        All ranks come to the same number of attempts: an attempt that fails on one of them fails on all, all judge it
        by what failed first, and each attempt is a transaction of its own whose name every rank can tell.
        """
        while True:
            try:
                return self._run_job(job)
            except (ConflictError, StorageError, RankFailureError) as error:
                if job.attempts >= self._options.retries or not _may_pass(error):
                    raise
                _log.warning(
                    "save of %s@%d, attempt %d of %d failed: %s",
                    self._run,
                    job.handle.step,
                    job.attempts + 1,
                    self._options.retries + 1,
                    error,
                )
                job.attempts += 1
                self.pools = Pools(self.pools.slabs, make_pools(self._options.host_budget_bytes).blocks)

    def _run_job(self, job: Job) -> SaveReport:
        """Write, then commit with the other ranks."""
        self.pools.blocks.reset_peak()
        meeting = self._meeting(job)
        plan = job.agreement.plan
        name = f"{self._run}@{job.handle.step}"
        with meeting.aborting():
            began = time.monotonic()
            with naming("writing", name, self._rank):
                written = self._write(job)
            job.handle.advance(SaveState.DURABLE)
            job.phases.end("write", began, "background")
            began = time.monotonic()
            with naming("committing", name, self._rank):
                ref, manifest = commit(
                    meeting,
                    plan,
                    written,
                    tree=job.tree if job.agreement.tree_differs or meeting.is_coordinator else None,
                    per_rank=job.per_rank,
                    metadata=job.metadata,
                )
            job.phases.end("commit", began, "background")
        if manifest is not None:
            self._store.keep(ref, manifest)
        job.phases.end("total", job.began, "whole save")
        return self._report(job, ref, written)

    def _write(self, job: Job) -> Written:
        """Write what this rank owns and nobody has; it is durable then."""
        # Marks before bases: what a base refers to is then either marked or safe for as long as this save may take.
        marked = self._marked()
        index = DedupIndex(self._base_manifests(job.bases), marked, self._hints_of_all_runs())
        options = WriteOptions(
            pack_bytes=min(self._options.pack_bytes, self.pools.room_bytes // 3),
            codec=Codec.ZSTD if self._options.codec == "zstd" else Codec.RAW,
            compare_whole=self._options.check_replicas,
        )
        tensors = job.agreement.plan.tensors
        writer = Writer(self._store.backend, tensors, index, self.pools.blocks, options, marked=marked)
        return writer.write(job.parts, job.compared)

    def _meeting(self, job: Job) -> Meeting:
        transaction = job.agreement.transaction
        if job.attempts:
            transaction = digest(f"{transaction}/{job.attempts}".encode()).hex()[: len(transaction)]
        return Meeting(
            backend=self._store.backend,
            transaction=transaction,
            plan_key=job.agreement.plan_key,
            run=self._run,
            step=job.handle.step,
            rank=self._rank,
            world_size=self._world_size,
            deadline_seconds=self._options.deadline_seconds,
            began=job.began,
            marks=self._store.marks,
        )

    def _marked(self) -> Marked:
        """Return what must not be referred to, because a collection is going to delete it."""
        marked = loop.run(self._store.marks.marked())
        if marked.unreadable:
            _log.warning("saving without deduplication, as %s cannot be read", ", ".join(marked.unreadable))
        return marked

    def _hints_of_all_runs(self) -> Hints | None:
        """Return the store's index, read anew, where saves are to be deduplicated against all runs."""
        if not self._options.dedup_across_runs:
            return None
        if self._hints is None:
            self._hints = Hints(self._store.backend)
        try:
            self._hints.refresh()
        except StorageError as error:
            _log.warning("saving %s without the store's index: %s", self._run, error)
            return None
        return self._hints

    def _base_manifests(self, bases: tuple[str, ...]) -> list[Manifest]:
        """Return the manifests to deduplicate against: the run's newest snapshot and the named bases.

        The newest one is for saving bytes alone, so a damaged one is left aside; a base that was asked for must open.
        """
        found = {snapshot.ref.manifest: snapshot.manifest for snapshot in (self._store[base] for base in bases)}
        try:
            latest = self._store.newest(self._run)
            if latest is not None and latest.manifest not in found:
                found[latest.manifest] = self._store.manifest(latest)
        except FormatError as error:
            _log.warning("saving without deduplication against the newest snapshot of %s: %s", self._run, error)
        return list(found.values())

    def _report(self, job: Job, ref: Ref, written: Written) -> SaveReport:
        loads = job.agreement.plan.bytes_by_rank
        mean = float(loads.mean())
        return SaveReport(
            run=self._run,
            step=job.handle.step,
            version=ref.version,
            bytes_total=written.bytes_total,
            bytes_deduplicated=written.bytes_deduplicated,
            bytes_written=written.bytes_put,
            chunks=len(written.tensor),
            packs=len(written.new_packs),
            attempts=job.attempts + 1,
            imbalance=float(loads.max()) / mean if mean else 1.0,
            peak_host_bytes=self.pools.peak_bytes,
            seconds=dict(job.phases.seconds),
        )


_PASSING: tuple[type[VeScaleError], ...] = (
    ConflictError,
    StorageError,
    AccessDeniedError,
    NoSpaceError,
    StorageTimeoutError,
    ThrottledError,
    RankFailureError,
)
_PASSING_KINDS = {cls.kind for cls in _PASSING}


def _may_pass(error: VeScaleError) -> bool:
    """Return whether trying again can help. Where other ranks failed, what they told says so, here as there."""
    if not isinstance(error, RankFailureError):
        return True
    kinds = [told.partition(": ")[0] for told in error.failures.values()]
    return all(kind in _PASSING_KINDS or " " in kind for kind in kinds)  # a sentence tells of a rank that fell silent
