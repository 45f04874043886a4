"""How a store is: what lies in it, what waits to be collected, what dead saves left, and what nobody can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_ckpt.diagnosis.checks import Check, Level
from vescale_ckpt.errors import FormatError, UnsupportedVersionError
from vescale_storage import loop, root
from vescale_storage.collect.plan import Tally
from vescale_storage.keys import PACKS_PREFIX

if TYPE_CHECKING:
    from vescale_ckpt.store import Store
    from vescale_storage.collect.plan import CollectionPlan

_DAY = 86400.0
_SPARSE_PART = 0.5


def check_health(store: Store, *, now: float) -> list[Check]:
    """Return what there is to say of a store; nothing is written, and no pack is read.

    Args:
        store: which.
        now: seconds since the epoch.

    Raises:
        UnsupportedVersionError: a newer writer made it.
        StorageError: the storage failed.
    """
    found = loop.run(root.create_or_open_root(store.backend, create=False, read_only=True))
    version = ".".join(map(str, found.version))
    checks = [
        Check(
            "store", Level.OK, f"version {version}, id {found.id}, {(now - found.created_seconds) / _DAY:.1f} days old"
        )
    ]
    try:
        plan = store.gc(dry_run=True, now=now).collection.plan
    except UnsupportedVersionError:
        raise
    except FormatError as error:
        return [*checks, Check("snapshots", Level.BAD, f"{error.message}; see fsck")]
    packs = loop.run(_packs(store))
    return [
        *checks,
        Check(
            "snapshots",
            Level.OK,
            f"{len(store.runs())} runs, {plan.num_refs} refs, {plan.num_tags} tags, all whole; no pack is missing",
        ),
        _garbage(plan, packs),
        _marks(plan),
        _leftovers(plan),
        _strange(plan),
    ]


async def _packs(store: Store) -> Tally:
    return Tally.of([info async for info in store.backend.list(PACKS_PREFIX)])


def _garbage(plan: CollectionPlan, packs: Tally) -> Check:
    unneeded = packs.size_bytes - plan.live_packs.size_bytes
    part = unneeded / packs.size_bytes if packs.size_bytes else 0.0
    detail = f"{packs.num} packs of {packs.size_bytes:,} bytes, of which no snapshot needs {unneeded:,} ({part:.0%})"
    if part > _SPARSE_PART:
        return Check("garbage", Level.NOTE, f"{detail}: run gc")
    return Check("garbage", Level.OK, detail)


def _marks(plan: CollectionPlan) -> Check:
    if plan.damaged_marks:
        names = ", ".join(plan.damaged_marks[:3])
        return Check("marks", Level.BAD, f"damaged: {names}; until gc has removed them no save shares anything")
    waiting = plan.waiting.num + sum(len(due.objects) for due in plan.due)
    due = sum(len(due.objects) for due in plan.due)
    detail = f"{waiting} objects are marked, {due} of them can go with the next gc"
    return Check("marks", Level.NOTE if due else Level.OK, detail)


def _leftovers(plan: CollectionPlan) -> Check:
    num = len(plan.transactions) + len(plan.leftovers)
    if not num:
        return Check("dead saves", Level.OK, "none")
    size = (Tally.of(plan.transactions) + Tally.of(plan.leftovers)).size_bytes
    return Check(
        "dead saves",
        Level.NOTE,
        f"{len(plan.transactions)} transactions and {len(plan.leftovers)} puts of more than a grace period ago, "
        f"{size:,} bytes: run gc",
    )


def _strange(plan: CollectionPlan) -> Check:
    if not plan.strange:
        return Check("strange keys", Level.OK, "none")
    return Check("strange keys", Level.NOTE, f"{len(plan.strange)}, among them {plan.strange[0]!a}: nobody reads these")
