"""Pruning: snapshots deleted from their run, by hand or by policy; their data stay until they are collected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import ConflictError, SnapshotNotFoundError
from vescale_ckpt.retention import PrunePlan, StepInfo, plan_prune
from vescale_storage.collect.versions import delete_versions, list_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vescale_ckpt.retention import RetentionPolicy
    from vescale_storage.backend import Backend


@dataclass(frozen=True, slots=True)
class Deleted:
    """A snapshot that was deleted, or would be."""

    run: str
    step: int
    num_versions: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning found and did."""

    plan: PrunePlan
    deleted: tuple[int, ...]
    """Steps that are gone now."""
    spared: tuple[int, ...]
    """Steps that were tagged after the plan was made."""
    num_superseded: int
    """Older versions, of steps that stay, that are gone now."""
    dry_run: bool


async def delete_snapshot(backend: Backend, run: str, step: int, *, dry_run: bool) -> Deleted:
    """Delete all versions of a step.

    Raises:
        SnapshotNotFoundError: there is no such snapshot.
        ConflictError: it is tagged.
        StorageError: the storage failed.
    """
    listing = await list_run(backend, run)
    versions = listing.committed_seconds.get(step, {})
    if not versions:
        raise SnapshotNotFoundError(
            f"cannot delete {run}@{step}: {backend.url} has no such snapshot", run=run, step=step
        )
    tags = listing.tags_of(step)
    if not tags and not dry_run and not await delete_versions(backend, run, step, versions):
        tags = (await list_run(backend, run)).tags_of(step)
    if tags:
        raise ConflictError(
            f"cannot delete {run}@{step} in {backend.url}: it is tagged {', '.join(tags)}; take the tags away first",
            run=run,
            step=step,
            tags=tags,
        )
    return Deleted(run, step, len(versions), dry_run)


async def prune_run(
    backend: Backend,
    run: str,
    policy: RetentionPolicy,
    *,
    now: float,
    keep_steps: Collection[int] = (),
    known: dict[str, float] | None = None,
    dry_run: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> Pruned:
    """Delete the snapshots of a run that a policy does not keep.

    Args:
        backend: where the store is.
        run: which run.
        policy: what stays.
        now: seconds since the epoch.
        keep_steps: stay as well.
        known: as for ``list_run``.
        dry_run: only plan.
        progress: called with what is being done and how many of them are done.

    Raises:
        FormatError: a tag cannot be read, so nobody can tell what it holds; nothing was deleted.
        StorageError: the storage failed; what was not deleted the next call deletes.
    """
    listing = await list_run(backend, run, known)
    steps = [
        StepInfo(step, tuple(sorted(versions)), versions[max(versions)], listing.tags_of(step))
        for step, versions in listing.committed_seconds.items()
    ]
    plan = plan_prune(run, steps, policy, now=now, keep_steps=keep_steps)
    if dry_run:
        return Pruned(plan, (), (), 0, dry_run=True)
    deleted: list[int] = []
    spared: list[int] = []
    for step in plan.deleted:
        # Only the versions that were seen: one that is saved meanwhile stays.
        gone = await delete_versions(backend, run, step, listing.committed_seconds[step])
        (deleted if gone else spared).append(step)
        if progress is not None:
            progress("snapshots deleted", len(deleted))
    num_superseded = 0
    for step in dict.fromkeys(step for step, _ in plan.superseded):
        versions = [version for number, version in plan.superseded if number == step]
        if await delete_versions(backend, run, step, versions):
            num_superseded += len(versions)
    return Pruned(plan, tuple(deleted), tuple(spared), num_superseded, dry_run=False)
