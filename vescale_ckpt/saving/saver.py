"""The saver: one run's saves in order, on the caller's thread first and in the background after.

On the caller's thread: see what this rank holds, agree with the other ranks, and stage. In the background, without any
collective: hash, deduplicate, pack, put, and meet the other ranks through the store's transaction, which ends in one
create-only put of a ref: the commit.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from vescale_ckpt.adapters.capture import Captured, capture
from vescale_ckpt.errors import RankFailureError, StateError, VeScaleError
from vescale_ckpt.execute.commit import Meeting, commit
from vescale_ckpt.execute.dedup import DedupIndex
from vescale_ckpt.execute.write import WriteOptions, Writer, Written
from vescale_ckpt.plan.parts import compared_parts, parts_of
from vescale_ckpt.saving.agree import NO_STEP, Agreement, Intent, PlanCache, agree
from vescale_ckpt.saving.handle import SaveHandle, SaveReport, SaveState
from vescale_ckpt.stage.memory import BufferPool
from vescale_ckpt.stage.stager import StagedPart, Stager
from vescale_ckpt.state.dtypes import item_bytes
from vescale_ckpt.state.merge import split_per_rank
from vescale_storage.pack import Codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.plan.save_plan import SavePlan
    from vescale_ckpt.saving.options import SaveOptions
    from vescale_ckpt.state.merge import PerRankEntries
    from vescale_ckpt.state.tree import Node
    from vescale_ckpt.store import Store
    from vescale_storage.refs import Ref

_log = logging.getLogger(__name__)

_SLAB_BYTES = 32 << 20
_BLOCK_BYTES = 8 << 20
_MOST_BLOCKS = 24
_FEWEST_BLOCKS = 3


@dataclass(slots=True)
class _Job:
    """One save between the caller's thread and the background."""

    handle: SaveHandle
    agreement: Agreement
    tree: Node
    per_rank: PerRankEntries
    bases: tuple[str, ...]
    metadata: dict[str, Any]
    compared: frozenset[int]
    parts: queue.SimpleQueue[StagedPart | BaseException | None] = field(default_factory=queue.SimpleQueue)
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def staged(self) -> Iterator[StagedPart]:
        """Yield the parts as they are staged; raise what staging raised."""
        while (part := self.parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part


class Saver:
    """Saves of one run. Not for several threads at once; all ranks make the same calls in the same order."""

    def __init__(self, store: Store, run: str, group: Group, options: SaveOptions) -> None:
        self._store = store
        self._run = run
        self._group = group
        self._options = options
        self._cache = PlanCache()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._handles: list[SaveHandle] = []
        self._opened = False
        self._pid = os.getpid()
        self._slabs, self._blocks = _make_pools(options.host_budget_bytes)

    def save(
        self, step: int, state: Any, *, blocking: bool, bases: tuple[str, ...], metadata: dict[str, Any]
    ) -> SaveHandle:
        """Begin a save; where ``blocking``, finish it too."""
        if self._pid != os.getpid():
            raise StateError("cannot save in a process that was forked off: make a Checkpointer in the child")
        began = time.monotonic()
        self._limit_in_flight()
        captured, tree, entries = self._prepare(step, state)
        failed_step = next((handle.step for handle in self._handles if handle.forgotten), NO_STEP)
        agreement = agree(
            self._group,
            captured,
            tree,
            self._cache,
            intent=Intent(self._run, step, bases, failed_step),
            on_failed=self._raise_earlier,
        )
        job = _Job(
            SaveHandle(self._run, step), agreement, tree, entries, bases, metadata, self._compared(agreement.plan)
        )
        job.began = began
        job.seconds["plan"] = time.monotonic() - began
        self._handles.append(job.handle)
        self._start(job)
        self._stage(job, captured, in_place=blocking)
        if blocking:
            job.handle.result()
        return job.handle

    def finish(self) -> None:
        """Wait for all saves under way and raise the first failure that nobody has seen."""
        errors = [handle.outcome() for handle in self._handles if not handle.done or handle.forgotten]
        self._handles.clear()
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the background thread after what is under way."""
        if self._thread is not None and self._pid == os.getpid():
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    # On the caller's thread ------------------------------------------------------------------------------------------

    def _limit_in_flight(self) -> None:
        under_way = [handle for handle in self._handles if not handle.done]
        for handle in under_way[: max(0, len(under_way) - self._options.most_in_flight + 1)]:
            handle.wait_done()
        self._handles = [handle for handle in self._handles if not handle.done or handle.forgotten]

    def _prepare(self, step: int, state: Any) -> tuple[Captured, Node, PerRankEntries]:
        """Return what this rank holds; raise on all ranks where any of them cannot tell."""
        phase = f"preparing the save of {self._run}@{step}"
        if not self._opened:  # rank 0 makes the store where there is none, then the others look
            if self._group.rank == 0:
                self._group.attempt(phase, lambda: self._store.require(create=True))
            else:
                self._group.attempt(phase, lambda: None)
            self._group.attempt(phase, self._store.require)
            self._opened = True

        def prepare() -> tuple[Captured, Node, PerRankEntries]:
            captured = capture(state, rank=self._group.rank)
            return captured, *split_per_rank(captured.tree)

        return self._group.attempt(phase, prepare)

    def _raise_earlier(self, failed_steps: frozenset[int]) -> NoReturn:
        """Raise on all ranks the failure of an earlier background save that some rank has not seen yet."""
        causes = [handle.outcome() for handle in self._handles if handle.step in failed_steps]
        step = min(failed_steps)
        message = (
            f"the earlier background save of {self._run}@{step} failed, so this one was not begun - call save again "
            "to go on without that step"
        )
        cause = next((cause for cause in causes if cause is not None), None)
        if isinstance(cause, VeScaleError):
            raise RankFailureError(f"{message} - {cause}", step=step) from cause
        raise RankFailureError(message, step=step) from cause

    def _compared(self, plan: SavePlan) -> frozenset[int]:
        """Return the tensors whose copies on several ranks are to be compared."""
        if self._options.check_replicas:
            return frozenset(plan.compared)
        return frozenset(t for t in plan.compared if plan.tensors[t].is_one_tile)

    def _stage(self, job: _Job, captured: Captured, *, in_place: bool) -> None:
        """Copy what this rank writes to host memory, part by part, and hand it to the background."""
        began = time.monotonic()
        plan = job.agreement.plan
        by_path = {leaf.path: leaf for leaf in captured.leaves}
        leaves = [by_path.get(record.path) for record in plan.tensors]
        widths = [item_bytes(record.dtype) for record in plan.tensors]
        parts = [
            *parts_of(plan.regions, plan.tensors, widths, self._slabs.buffer_bytes),
            *compared_parts(sorted(job.compared), plan.regions, plan.tensors, every=self._options.check_replicas),
        ]

        def give_up() -> None:
            if job.handle.done:
                job.handle.result()

        try:
            with torch.no_grad():
                stager = Stager(self._slabs, self._options.deadline_seconds)
                stager.stage(parts, leaves, job.parts.put, in_place=in_place, on_wait=give_up)
        except BaseException as error:
            job.parts.put(error)
            raise
        job.parts.put(None)
        job.seconds["stage"] = time.monotonic() - began
        if not in_place:
            job.handle.advance(SaveState.STAGED)

    # In the background -----------------------------------------------------------------------------------------------

    def _start(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="vescale-save", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._run_job(job)
            except BaseException as error:  # noqa: BLE001 -- a thread hands every error to its future
                _log.error("the save of %s@%d failed: %s", self._run, job.handle.step, error)
                # What was in flight may still refer to buffers of the pools, so they are not used again.
                self._slabs, self._blocks = _make_pools(self._options.host_budget_bytes)
                job.handle.end(error)

    def _run_job(self, job: _Job) -> None:
        """Write, then commit with the other ranks."""
        meeting = Meeting(
            backend=self._store.backend,
            transaction=job.agreement.transaction,
            plan_key=job.agreement.plan_key,
            run=self._run,
            step=job.handle.step,
            rank=self._group.rank,
            world_size=self._group.world_size,
            deadline_seconds=self._options.deadline_seconds,
        )
        plan = job.agreement.plan
        with meeting.aborting():
            began = time.monotonic()
            index = DedupIndex(self._base_manifests(job.bases))
            writer = Writer(self._store.backend, plan.tensors, index, self._blocks, self._write_options())
            written = writer.write(job.staged(), job.compared)
            job.handle.advance(SaveState.DURABLE)
            job.seconds["write"] = time.monotonic() - began
            began = time.monotonic()
            ref, manifest = commit(
                meeting,
                plan,
                written,
                tree=job.tree if job.agreement.tree_differs or meeting.is_coordinator else None,
                per_rank=job.per_rank,
                metadata=job.metadata,
            )
            job.seconds["commit"] = time.monotonic() - began
        if manifest is not None:
            self._store.keep(ref, manifest)
        job.seconds["total"] = time.monotonic() - job.began
        job.handle.end(self._report(job, ref, written))

    def _base_manifests(self, bases: tuple[str, ...]) -> list[Manifest]:
        """Return the manifests to deduplicate against: the run's newest snapshot and the named bases."""
        found = {snapshot.ref.manifest: snapshot.manifest for snapshot in (self._store[base] for base in bases)}
        latest = self._store.newest(self._run)
        if latest is not None:
            found[latest.manifest] = self._store.manifest(latest)
        return list(found.values())

    def _write_options(self) -> WriteOptions:
        room_bytes = self._blocks.buffer_bytes * (self._blocks.most or _MOST_BLOCKS)
        codec = Codec.ZSTD if self._options.codec == "zstd" else Codec.RAW
        return WriteOptions(pack_bytes=min(self._options.pack_bytes, room_bytes // 3), codec=codec)

    def _report(self, job: _Job, ref: Ref, written: Written) -> SaveReport:
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
            imbalance=float(loads.max()) / mean if mean else 1.0,
            peak_host_bytes=self._blocks.peak_bytes + self._slabs.peak_bytes,
            seconds=dict(job.seconds),
        )


def _make_pools(budget_bytes: int | None) -> tuple[BufferPool, BufferPool]:
    """Return (slabs to stage in, blocks to write from) that stay within a budget together."""
    pinned = torch.cuda.is_available()
    if budget_bytes is None:
        return BufferPool(_SLAB_BYTES, None, pinned=pinned), BufferPool(_BLOCK_BYTES, _MOST_BLOCKS)
    block_bytes = min(_BLOCK_BYTES, budget_bytes // 8)
    num_blocks = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, budget_bytes // 2 // block_bytes))
    slab_bytes = min(_SLAB_BYTES, budget_bytes // 8)
    num_slabs = (budget_bytes - num_blocks * block_bytes) // slab_bytes
    return BufferPool(slab_bytes, num_slabs, pinned=pinned), BufferPool(block_bytes, num_blocks)
