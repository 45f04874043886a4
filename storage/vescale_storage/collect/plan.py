"""The plan of a collection: what is needed, what may be deleted now, what is to be marked. No storage, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_storage.collect.marks import mark_key, sweep_key
from vescale_storage.errors import FormatError
from vescale_storage.keys import parse_index_key, parse_manifest_key, parse_pack_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vescale_storage.backend import Leftover, ObjectInfo
    from vescale_storage.collect.gc_objects import GcListing
    from vescale_storage.collect.marks import Mark
    from vescale_storage.collect.roots import Roots
    from vescale_storage.transaction_objects import TransactionInfo

PACK: Final = "pack"
MANIFEST: Final = "manifest"


@dataclass(frozen=True, slots=True)
class Tally:
    """How many objects, and their bytes."""

    num: int = 0
    size_bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.num + other.num, self.size_bytes + other.size_bytes)

    @classmethod
    def of(cls, objects: Iterable[Doomed | TransactionInfo | Leftover | ObjectInfo]) -> Tally:
        """Return the tally of some objects."""
        num = size_bytes = 0
        for each in objects:
            num += 1
            size_bytes += each.size_bytes
        return cls(num, size_bytes)


@dataclass(frozen=True, slots=True)
class Doomed:
    """An unreachable object."""

    kind: str
    """``pack`` or ``manifest``."""
    name: str
    """64 hex digits."""
    key: str
    size_bytes: int
    modified_seconds: float


@dataclass(frozen=True, slots=True)
class Due:
    """A mark that may be acted on, and what of it is still there and still unreachable."""

    mark: Mark
    objects: tuple[Doomed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    """What a collection found and would do; printing it is the dry run."""

    now_seconds: float
    grace_seconds: float
    num_refs: int
    num_tags: int
    live_packs: Tally
    live_manifests: Tally
    due: tuple[Due, ...]
    """To be deleted: marked long enough ago and still unreachable."""
    to_mark: tuple[Doomed, ...]
    """To be written down now, and deleted by a collection after the grace period."""
    waiting: Tally
    """Marked already; their grace period is not over."""
    next_due_seconds: float | None
    """When the first of the waiting ones may be deleted."""
    young: Tally
    """Unreachable, but younger than the grace period: a save may be under way."""
    transactions: tuple[TransactionInfo, ...]
    """Left by saves that died."""
    leftovers: tuple[Leftover, ...]
    """Left by puts that died."""
    hints: tuple[ObjectInfo, ...]
    """Index objects of manifests that nothing leads to."""
    damaged_marks: tuple[str, ...]
    """Names of marks that nobody can read: they keep writers from sharing content, and go without being acted on."""
    finished: tuple[str, ...]
    """Keys under ``gc/`` that have served; each mark comes before its sweep record."""
    missing: tuple[str, ...]
    """Packs that a snapshot needs and that were not listed."""
    strange: tuple[str, ...]
    """Keys that nobody of this version makes; they are left alone."""

    @property
    def deletable(self) -> Tally:
        """Packs and manifests that are deleted now; without a grace period also what is marked in the same call."""
        now = [each for due in self.due for each in due.objects]
        return Tally.of([*now, *self.to_mark]) if self.grace_seconds == 0 else Tally.of(now)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        work = self.due, self.to_mark, self.transactions, self.leftovers, self.hints, self.finished, self.damaged_marks
        return not any(work)


@dataclass(slots=True)
class Found:
    """What the listings of packs and manifests came to."""

    packs: Tally = field(default_factory=Tally)
    """Live ones."""
    manifests: Tally = field(default_factory=Tally)
    """Live ones."""
    seen: set[str] = field(default_factory=set)
    """Names of live packs."""
    unreachable: list[Doomed] = field(default_factory=list)
    hints: list[ObjectInfo] = field(default_factory=list)
    """Index objects of manifests that nothing leads to."""
    strange: list[str] = field(default_factory=list)

    def add_pack(self, info: ObjectInfo, roots: Roots) -> None:
        """Take a listed pack."""
        name = self._name(info, parse_pack_key)
        if name in roots.packs:
            self.packs += Tally(1, info.size_bytes)
            self.seen.add(name)
        elif name:
            self.unreachable.append(Doomed(PACK, name, info.key, info.size_bytes, info.modified_seconds))

    def add_manifest(self, info: ObjectInfo, roots: Roots) -> None:
        """Take a listed manifest."""
        name = self._name(info, parse_manifest_key)
        if name in roots.packs_of:
            self.manifests += Tally(1, info.size_bytes)
        elif name:
            self.unreachable.append(Doomed(MANIFEST, name, info.key, info.size_bytes, info.modified_seconds))

    def add_hint(self, info: ObjectInfo, roots: Roots) -> None:
        """Take a listed index object."""
        name = self._name(info, parse_index_key)
        if name and name not in roots.packs_of:
            self.hints.append(info)

    def _name(self, info: ObjectInfo, parse: Callable[[str], str]) -> str:
        try:
            return parse(info.key)
        except FormatError:
            self.strange.append(info.key)
            return ""

    def named_by(self, mark: Mark) -> list[Doomed]:
        """Return the unreachable objects that a mark names and that nobody has put since."""
        return [
            each
            for each in self.unreachable
            if each.name in (mark.packs if each.kind == PACK else mark.manifests)
            and each.modified_seconds <= mark.created_seconds
        ]


def plan_collection(
    found: Found,
    roots: Roots,
    gc: GcListing,
    *,
    transactions: Iterable[TransactionInfo],
    leftovers: Iterable[Leftover],
    now: float,
    grace_seconds: float,
) -> CollectionPlan:
    """Return what a collection is to do.

    Args:
        found: all packs and manifests.
        roots: what is needed; read after ``gc`` was listed.
        gc: marks and sweep records.
        transactions: that have objects.
        leftovers: of the back end.
        now: seconds since the epoch, by the storage's clock.
        grace_seconds: longer than any save.
    """
    old = now - grace_seconds
    due: list[Due] = []
    pending: list[tuple[Mark, list[Doomed]]] = []
    taken: set[str] = set()
    for name, mark in sorted(gc.marks.items()):
        if name in gc.sweeps:
            continue  # acted on already; what is left of it is marked anew
        if now - mark.created_seconds >= max(grace_seconds, mark.grace_seconds):
            objects = tuple(each for each in found.named_by(mark) if each.key not in taken)
            due.append(Due(mark, objects))
            taken |= {each.key for each in objects}
        elif mark.grace_seconds <= grace_seconds:
            pending.append((mark, found.named_by(mark)))
    waiting = {each.key: each for _, objects in pending for each in objects if each.key not in taken}
    ages = [mark.created_seconds for mark, objects in pending if objects]
    left = [each for each in found.unreachable if each.key not in taken and each.key not in waiting]
    return CollectionPlan(
        now_seconds=now,
        grace_seconds=grace_seconds,
        num_refs=len(roots.refs),
        num_tags=len(roots.tags),
        live_packs=found.packs,
        live_manifests=found.manifests,
        due=tuple(due),
        to_mark=tuple(each for each in left if each.modified_seconds <= old),
        waiting=Tally.of(waiting.values()),
        next_due_seconds=min(ages) + grace_seconds if ages else None,
        young=Tally.of(each for each in left if each.modified_seconds > old),
        transactions=tuple(each for each in transactions if each.modified_seconds <= old),
        leftovers=tuple(each for each in leftovers if each.modified_seconds <= old),
        hints=tuple(each for each in found.hints if each.modified_seconds <= old),
        damaged_marks=tuple(sorted(name for name in gc.damaged if name not in gc.sweeps)),
        finished=_finished(gc, now, old),
        missing=tuple(sorted(roots.packs - found.seen)),
        strange=(*found.strange, *gc.strange),
    )


def _finished(gc: GcListing, now: float, old: float) -> tuple[str, ...]:
    keys: list[str] = []
    for name, sweep in sorted(gc.sweeps.items()):
        if sweep.is_over(now):
            # The mark first: without its sweep record somebody else might act on it, without it nobody does.
            keys += [mark_key(name), sweep_key(name)]
    return (*keys, *(info.key for info in gc.clocks if info.modified_seconds <= old))
