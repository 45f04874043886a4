"""The collection itself: look, plan, and do what the plan says, in an order in which no crash loses anything."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_storage.collect.gc_objects import list_gc
from vescale_storage.collect.marks import (
    DEFAULT_GRACE_SECONDS,
    LATE_PART,
    OWNER_DIGITS,
    Mark,
    Sweep,
    clock_key,
    encode_mark,
    encode_sweep,
    mark_key,
    split_marks,
    sweep_key,
)
from vescale_storage.collect.plan import MANIFEST, PACK, CollectionPlan, Due, Found, Tally, plan_collection
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    ObjectNotFoundError,
)
from vescale_storage.keys import INDEX_PREFIX, MANIFESTS_PREFIX, PACKS_PREFIX, pack_key
from vescale_storage.parallel import map_bounded
from vescale_storage.transaction_objects import clean_transaction, find_transactions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vescale_storage.backend import Backend
    from vescale_storage.collect.plan import Doomed
    from vescale_storage.collect.roots import RootReader, Roots

_NUM_DELETES: Final = 64
_NUM_HEADS: Final = 32
_MOST_GRACE_SECONDS: Final = 10 * 366 * 24 * 3600.0


@dataclass(slots=True)
class Collected:
    """What a collection did."""

    packs: Tally = field(default_factory=Tally)
    """Deleted."""
    manifests: Tally = field(default_factory=Tally)
    """Deleted."""
    marked: Tally = field(default_factory=Tally)
    """Written down, to be deleted after the grace period."""
    unfinished: Tally = field(default_factory=Tally)
    """Due, but the sweep had to end before their turn; a later collection marks them anew."""
    transactions: Tally = field(default_factory=Tally)
    leftovers: Tally = field(default_factory=Tally)
    hints: Tally = field(default_factory=Tally)
    """Index objects of manifests that nothing led to."""
    seconds: float = 0.0

    @property
    def deleted(self) -> Tally:
        """Packs and manifests together."""
        return self.packs + self.manifests


@dataclass(frozen=True, slots=True)
class Collection:
    """One call: what was found, and what became of it."""

    plan: CollectionPlan
    done: Collected
    dry_run: bool


class Collector:
    """Collects in one store. For the event loop alone.

    Args:
        backend: where the store is.
        roots: reads its refs, tags and manifests.
        grace_seconds: must be more than twice as long as any save; 0 only if nobody else uses the store.
        now: seconds since the epoch, by the clock that dates the objects: see ``storage_clock``.
        progress: called with what is being done and how many of them are done.
    """

    def __init__(
        self,
        backend: Backend,
        roots: RootReader,
        *,
        now: float,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        progress: Callable[[str, int], None] | None = None,
    ) -> None:
        if not 0 <= grace_seconds <= _MOST_GRACE_SECONDS:
            raise ConfigError(
                f"cannot collect with a grace period of {grace_seconds!r} seconds: expected 0 to "
                f"{_MOST_GRACE_SECONDS:.0f}; it must be longer than any save takes"
            )
        self._backend = backend
        self._roots = roots
        self._grace_seconds = round(grace_seconds, 3)
        self._now = math.ceil(now * 1000) / 1000  # marks count milliseconds
        self._progress = progress or _ignore
        self._done = Collected()
        self._owner = os.urandom(OWNER_DIGITS // 2).hex()
        self._began = 0.0
        """When it looked at the clock, by the loop's."""

    async def collect(self, *, dry_run: bool = False) -> Collection:
        """Look, plan, and unless ``dry_run`` do it.

        Several collections, and any number of savers and loaders, may run at the same time.

        Raises:
            CorruptionError, FormatError, UnsupportedVersionError: a ref, tag or manifest cannot be read, or a pack that
                a snapshot needs is gone; nothing was deleted.
            StorageError: the storage failed; what was not done a later collection does.
        """
        began = time.monotonic()
        self._began = asyncio.get_running_loop().time()
        plan = await self._plan()
        if not dry_run:
            await self._execute(plan)
        self._done.seconds = time.monotonic() - began
        return Collection(plan, self._done, dry_run)

    # ---- looking

    async def _plan(self) -> CollectionPlan:
        # In this order: a mark that is old enough now is older than all roots that are read after it was.
        gc = await list_gc(self._backend)
        roots = await self._roots.read(self._progress)
        found = Found()
        async for info in self._backend.list(PACKS_PREFIX):
            found.add_pack(info, roots)
        async for info in self._backend.list(MANIFESTS_PREFIX):
            found.add_manifest(info, roots)
        async for info in self._backend.list(INDEX_PREFIX):
            found.add_hint(info, roots)
        self._progress("objects listed", found.packs.num + found.manifests.num + len(found.unreachable))
        plan = plan_collection(
            found,
            roots,
            gc,
            transactions=await find_transactions(self._backend),
            leftovers=await self._backend.leftovers(),
            now=self._now,
            grace_seconds=self._grace_seconds,
        )
        await self._refuse_missing(plan.missing)
        return plan

    async def _refuse_missing(self, names: Sequence[str]) -> None:
        """Stop if packs that a snapshot needs are gone: an unreachable one may hold the only copy of their chunks."""

        async def is_gone(name: str) -> bool:
            try:
                await self._backend.head(pack_key(name))
            except ObjectNotFoundError:
                return True
            return False  # put after the listing

        gone = await map_bounded(is_gone, names, _NUM_HEADS)
        if not any(gone):
            return
        roots = await self._roots.read()  # again: the last snapshot that needed them may just have been deleted
        missing = [name for name, is_missing in zip(names, gone, strict=True) if is_missing and name in roots.packs]
        if missing:
            holders = [m for m, packs in roots.packs_of.items() if not packs.isdisjoint(missing)]
            snapshots = sorted({name for manifest in holders for name in roots.names_of(manifest)})
            raise CorruptionError(
                f"cannot collect in {self._backend.url}: of the packs of {', '.join(snapshots[:5])} {len(missing)} are "
                f"not there, among them {pack_key(missing[0])!r} - "
                "what nothing refers to may hold the last copy of their content, so nothing was deleted; bring them "
                "back from a copy, or delete these snapshots",
                packs=tuple(missing),
                snapshots=tuple(snapshots),
            )

    # ---- doing

    async def _execute(self, plan: CollectionPlan) -> None:
        for due in plan.due:
            await self._sweep(due, plan.now_seconds)
        marks = await self._mark(plan)
        for name in plan.damaged_marks:
            # Nobody may act on it after this, and by the time that it goes nobody who did before is still at it.
            await self._claim(Sweep(name, plan.now_seconds, self._grace_seconds, self._owner))
        for transaction in plan.transactions:
            await clean_transaction(self._backend, transaction.id)
            self._done.transactions += Tally(1, transaction.size_bytes)
            self._progress("transactions removed", self._done.transactions.num)
        for leftover in plan.leftovers:
            await self._backend.remove_leftover(leftover)
            self._done.leftovers += Tally(1, leftover.size_bytes)
            self._progress("leftovers removed", self._done.leftovers.num)
        # Nothing depends on a hint, so it needs no mark; what it leads to may be there a while longer.
        await map_bounded(self._backend.delete, (info.key for info in plan.hints), _NUM_DELETES)
        self._done.hints = Tally.of(plan.hints)
        for key in plan.finished:
            await self._backend.delete(key)
        if self._grace_seconds == 0 and marks:
            await self._sweep_at_once(marks, plan)

    async def _mark(self, plan: CollectionPlan) -> list[Mark]:
        # Writers cannot see a mark before it is there, so its time must not be much earlier than that.
        late_seconds = asyncio.get_running_loop().time() - self._began
        marks = split_marks(
            (each.name for each in plan.to_mark if each.kind == PACK),
            (each.name for each in plan.to_mark if each.kind == MANIFEST),
            now=plan.now_seconds + (late_seconds if late_seconds > LATE_PART * self._grace_seconds > 0 else 0.0),
            grace_seconds=self._grace_seconds,
        )
        for mark in marks:
            await self._backend.put_if_absent(mark.key, encode_mark(mark))
        self._done.marked += Tally.of(plan.to_mark)
        return marks

    async def _sweep_at_once(self, marks: Sequence[Mark], plan: CollectionPlan) -> None:
        """Act on marks that were just made, which is right only without a grace period."""
        roots: Roots = await self._roots.read()
        needed = roots.packs.union(roots.packs_of)
        for mark in marks:
            names = mark.packs | mark.manifests
            objects = tuple(each for each in plan.to_mark if each.name in names and each.name not in needed)
            await self._sweep(Due(mark, objects), plan.now_seconds)

    async def _sweep(self, due: Due, now: float) -> None:
        """Delete what a mark names: all that is known to be unreachable, manifests before the packs they name."""
        sweep = Sweep(due.mark.name, now, max(due.mark.grace_seconds, self._grace_seconds), self._owner)
        ends = self._began + sweep.grace_seconds if sweep.grace_seconds else math.inf
        if not await self._claim(sweep):
            return  # another collection is at it, or has been
        for kind in (MANIFEST, PACK):
            objects = [each for each in due.objects if each.kind == kind]
            await map_bounded(functools.partial(self._delete, ends), objects, _NUM_DELETES)
        if sweep.grace_seconds == 0:
            await self._backend.delete(mark_key(sweep.mark))
            await self._backend.delete(sweep_key(sweep.mark))

    async def _claim(self, sweep: Sweep) -> bool:
        """Return whether the right to act on a mark is ours; of all collections one gets it, and once only."""
        try:
            await self._backend.put_if_absent(sweep.key, [encode_sweep(sweep)])
        except AlreadyExistsError:
            return False
        try:
            await self._backend.head(mark_key(sweep.mark))
        except ObjectNotFoundError:
            # Acted on, waited out and removed since it was listed, and its sweep record with it.
            with contextlib.suppress(ObjectNotFoundError):
                await self._backend.delete(sweep.key)
            return False
        return True

    async def _delete(self, ends: float, each: Doomed) -> None:
        if asyncio.get_running_loop().time() >= ends:
            self._done.unfinished += Tally(1, each.size_bytes)
            return
        await self._backend.delete(each.key)
        tally = Tally(1, each.size_bytes)
        if each.kind == PACK:
            self._done.packs += tally
        else:
            self._done.manifests += tally
        self._progress("objects deleted", self._done.deleted.num)


async def storage_clock(backend: Backend) -> float:
    """Return the time by the storage's clock, which dates the objects; a wrong clock of this machine does no harm.

    Raises:
        StorageError: the storage failed.
    """
    key = clock_key()
    await backend.put(key, [b"what time is it?\n"])
    try:
        return (await backend.head(key)).modified_seconds
    finally:
        await backend.delete(key)


def _ignore(what: str, num_done: int) -> None:
    """Take a report of progress and do nothing with it."""
