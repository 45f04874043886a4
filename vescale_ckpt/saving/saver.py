"""The saver: what a save does on the caller's thread, before the background writes and commits.

See what this rank holds, agree with the other ranks, and stage: copy to host memory, after which the caller may change
its tensors. What an optimizer owns (parameters and their state) changes only in ``optimizer.step``, so a background
save copies it while forward and backward run, and a hook makes the next ``step`` wait for the copy; all else is copied
before ``save`` returns.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from vescale_ckpt.adapters.capture import Captured, capture
from vescale_ckpt.adapters.names import find_optimizers
from vescale_ckpt.errors import RankFailureError, StateError, VeScaleError
from vescale_ckpt.format.json_text import check_json
from vescale_ckpt.plan.parts import Part, compared_parts, parts_of
from vescale_ckpt.saving.agree import NO_STEP, Intent, PlanCache, Prepared, agree
from vescale_ckpt.saving.background import Background
from vescale_ckpt.saving.exits import finish_at_exit
from vescale_ckpt.saving.handle import SaveHandle, SaveState
from vescale_ckpt.saving.job import Job, PartQueue
from vescale_ckpt.stage.stager import Stager
from vescale_ckpt.state.dtypes import item_bytes
from vescale_ckpt.state.merge import split_per_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.plan.save_plan import SavePlan
    from vescale_ckpt.retention import RetentionPolicy
    from vescale_ckpt.saving.options import SaveOptions
    from vescale_ckpt.state.leaf import TensorLeaf
    from vescale_ckpt.store import Store

_log = logging.getLogger(__name__)


class Saver:
    """Saves of one run. Not for several threads at once; all ranks make the same calls in the same order."""

    def __init__(
        self, store: Store, run: str, group: Group, options: SaveOptions, retention: RetentionPolicy | None = None
    ) -> None:
        self._store = store
        self._run = run
        self._group = group
        self._options = options
        self._cache = PlanCache()
        self._background = Background(store, run, group, options, retention)
        # A saver that nobody closed takes its thread and its buffers with it.
        weakref.finalize(self, self._background.let_go).atexit = False
        self._handles: list[SaveHandle] = []
        self._opened = False
        self._pid = os.getpid()

    def save(
        self, step: int, state: Any, *, blocking: bool, bases: tuple[str, ...], metadata: dict[str, Any]
    ) -> SaveHandle:
        """Begin a save; where ``blocking``, finish it too."""
        if self._pid != os.getpid():
            raise StateError("cannot save in a process that was forked off: make a Checkpointer in the child")
        began = time.monotonic()
        self._limit_in_flight()
        self._open(step)
        prepared = self._prepare(state, metadata)
        failed_step = next((handle.step for handle in self._handles if handle.forgotten), NO_STEP)
        agreement = agree(
            self._group,
            prepared,
            self._cache,
            intent=Intent(self._run, step, bases, failed_step),
            on_failed=self._raise_earlier,
        )
        assert isinstance(prepared, Prepared)  # noqa: S101 -- narrows the type: agree has raised otherwise
        job = Job(
            handle=SaveHandle(self._run, step),
            agreement=agreement,
            tree=prepared.tree,
            per_rank=prepared.per_rank,
            bases=bases,
            metadata=metadata,
            compared=frozenset(agreement.plan.compared),
            parts=PartQueue(keep=self._options.retries > 0),
            began=began,
        )
        job.phases.end("plan", began)
        self._handles.append(job.handle)
        finish_at_exit(job.handle)
        self._background.pools.slabs.reset_peak()
        self._background.begin(job)
        self._stage(job, prepared.captured, state, blocking=blocking)
        if blocking:
            job.handle.result()
        return job.handle

    def finish(self) -> None:
        """Wait for all saves under way and raise the first failure that nobody has seen."""
        errors = [handle.outcome() for handle in self._handles if not handle.done or handle.forgotten]
        self._handles.clear()
        for error in errors:
            if error is not None and self._options.on_failure != "warn":
                raise error

    def close(self) -> None:
        """End the background thread after what is under way."""
        if self._pid == os.getpid():
            self._background.close()

    def _limit_in_flight(self) -> None:
        under_way = [handle for handle in self._handles if not handle.done]
        for handle in under_way[: max(0, len(under_way) - self._options.most_in_flight + 1)]:
            handle.wait_done()
        for handle in self._handles:
            if handle.forgotten and self._options.on_failure == "warn":
                _log.warning("the save of %s@%d failed: %s", self._run, handle.step, handle.outcome())
        self._handles = [handle for handle in self._handles if not handle.done or handle.forgotten]

    def _open(self, step: int) -> None:
        """Before the first save: rank 0 makes the store where there is none, then the others look."""
        if self._opened:
            return
        phase = f"opening {self._store.url} for {self._run}@{step}"
        if self._group.rank == 0:
            self._group.attempt(phase, lambda: self._store.require(create=True))
        else:
            self._group.attempt(phase, lambda: None)
        self._group.attempt(phase, self._store.require)
        self._opened = True

    def _prepare(self, state: Any, metadata: dict[str, Any]) -> Prepared | Exception:
        """Return what this rank holds, or why it cannot tell; capturing runs the caller's own ``state_dict``."""
        try:
            check_json(metadata, "metadata")
            captured = capture(state, rank=self._group.rank)
            return Prepared(captured, *split_per_rank(captured.tree))
        except Exception as error:  # noqa: BLE001 -- raised on this rank once the others know
            return error

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

    def _stage(self, job: Job, captured: Captured, state: Any, *, blocking: bool) -> None:
        """Hand what this rank writes to the background, copied where the caller goes on meanwhile."""
        began = time.monotonic()
        stager = Stager(self._background.pools.slabs, self._options.deadline_seconds)
        plan = job.agreement.plan
        by_path = {leaf.path: leaf for leaf in captured.leaves}
        leaves = [by_path.get(record.path) for record in plan.tensors]
        parts = self._parts(job, plan)
        if blocking:
            self._copy(job, stager, parts, leaves, in_place=True)
            job.parts.end()
            job.phases.end("stage", began)
            return
        later: list[Part] = []
        optimizers = list(find_optimizers(state))
        if optimizers and self._options.overlap_staging:
            owned = _memory_of(optimizers)
            later = [part for part in parts if _is_in(leaves[part.tensor], owned)]
            chosen = {id(part) for part in later}
            parts = [part for part in parts if id(part) not in chosen]
        self._copy(job, stager, parts, leaves, in_place=False)
        job.phases.end("stage", began)
        if later:
            self._copy_behind(job, lambda: self._copy(job, stager, later, leaves, in_place=False), optimizers)
        else:
            job.parts.end()
            job.handle.advance(SaveState.STAGED)

    @staticmethod
    def _copy_behind(job: Job, copy_rest: Callable[[], None], optimizers: list[torch.optim.Optimizer]) -> None:
        """Stage the last parts on a thread of their own, and make the optimizers wait for it."""
        began = time.monotonic()
        hooks = [optimizer.register_step_pre_hook(_Wait(job.handle)) for optimizer in optimizers]

        def copy() -> None:
            try:
                copy_rest()
                job.parts.end()
                job.handle.advance(SaveState.STAGED)
            except BaseException as error:  # noqa: BLE001 -- the queue carries it to the background, which reports it
                job.parts.end(error)
            finally:
                job.phases.end("stage_overlapped", began, "staging")
                for hook in hooks:
                    hook.remove()

        threading.Thread(target=copy, name="vescale-stage", daemon=True).start()

    def _parts(self, job: Job, plan: SavePlan) -> list[Part]:
        widths = [item_bytes(record.dtype) for record in plan.tensors]
        slab_bytes = self._background.pools.slabs.buffer_bytes
        every = self._options.check_replicas
        return [
            *parts_of(plan.regions, plan.tensors, widths, slab_bytes),
            *compared_parts(sorted(job.compared), plan.regions, plan.tensors, every=every),
        ]

    @staticmethod
    def _copy(
        job: Job, stager: Stager, parts: Iterable[Part], leaves: Sequence[TensorLeaf | None], *, in_place: bool
    ) -> None:
        """Stage parts; where that fails, so does the job."""

        def give_up() -> None:
            if job.handle.done:
                job.handle.result()

        try:
            with torch.no_grad():
                stager.stage(parts, leaves, job.parts.put, in_place=in_place, on_wait=give_up)
        except BaseException as error:
            job.parts.end(error)
            raise


class _Wait:
    """A hook before ``optimizer.step`` that waits until its tensors are copied."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def __call__(self, *_: Any) -> None:
        self._handle.wait_copied()


def _memory_of(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """Return the storages that only ``step`` of these optimizers changes."""
    owned: set[int] = set()
    for optimizer in optimizers:
        tensors = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            owned.add(local.untyped_storage().data_ptr())
    return owned


def _is_in(leaf: TensorLeaf | None, owned: set[int]) -> bool:
    return leaf is not None and all(p.view.untyped_storage().data_ptr() in owned for p in leaf.pieces)
