"""Commit: the ranks' fragments become one proven manifest, and one create-only put makes it visible.

The coordinator (rank 0) collects what every rank wrote, proves that every element of every tensor is covered exactly
once and that every pack is there whole, puts the manifest, then the ref. The others learn the outcome from the ref or
from an abort record. A kill between any two steps leaves the snapshots that were there before, and bytes that a retry
reuses or gc removes.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import ConflictError, CorruptionError, ObjectNotFoundError, VeScaleError
from vescale_ckpt.execute.hints import put_hints
from vescale_ckpt.execute.manifests import store_manifest
from vescale_ckpt.execute.shares import settle_shares
from vescale_ckpt.format.assemble import assemble, check_agreement
from vescale_ckpt.format.fragment import Fragment, FragmentChunks, decode_fragments, encode_fragment
from vescale_ckpt.format.records import Manifest
from vescale_ckpt.plan.load_plan import prove_covers
from vescale_ckpt.state.merge import fill_per_rank, merge_trees
from vescale_storage import loop
from vescale_storage.collect.gc_objects import MarkReader
from vescale_storage.collect.marks import refused
from vescale_storage.keys import pack_key
from vescale_storage.parallel import map_bounded
from vescale_storage.refs import create_ref
from vescale_storage.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vescale_ckpt.execute.write import Written
    from vescale_ckpt.format.records import TensorRecord
    from vescale_ckpt.plan.save_plan import SavePlan
    from vescale_ckpt.state.merge import PerRankEntries
    from vescale_ckpt.state.tree import Node
    from vescale_storage.backend import Backend
    from vescale_storage.refs import Ref

_NUM_REQUESTS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """One rank's place in one transaction."""

    backend: Backend
    transaction: str
    plan_key: bytes
    run: str
    step: int
    rank: int
    world_size: int
    deadline_seconds: float
    began: float = field(default_factory=time.monotonic)
    """``time.monotonic`` of when the save began, on whichever rank commits: before any rank looked at the marks."""
    marks: MarkReader | None = None
    """Reads what collections are going to delete; kept from save to save, it reads each mark once."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank commits."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """``run@step``."""
        return f"{self.run}@{self.step}"

    def transaction_in_storage(self) -> Transaction:
        """Return the transaction as storage sees it."""
        return Transaction(self.backend, self.transaction, self.world_size)

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """Tell the other ranks, through storage, when the body fails here."""
        try:
            yield
        except BaseException as error:
            if self.world_size > 1:
                kind = error.kind if isinstance(error, VeScaleError) else type(error).__name__
                with contextlib.suppress(VeScaleError):  # they run into their deadline then; the first error counts
                    loop.run(self.transaction_in_storage().abort(self.rank, str(error), kind))
            raise


def commit(
    meeting: Meeting,
    plan: SavePlan,
    written: Written,
    *,
    tree: Node | None,
    per_rank: PerRankEntries,
    metadata: dict[str, Any],
) -> tuple[Ref, Manifest | None]:
    """Commit with the other ranks; return the ref, and on the coordinator the manifest.

    Args:
        meeting: which transaction.
        plan: the save plan that all ranks made.
        written: what this rank wrote; durable by now.
        tree: this rank's tree, without per-rank values; None where it is the coordinator's.
        per_rank: this rank's per-rank values.
        metadata: the user's; the coordinator's counts.

    Raises:
        RankFailureError: another rank failed or never reported; names it.
        MismatchError: ranks disagree on replicated state.
        CorruptionError: a pack that the snapshot needs is not there whole.
        ConflictError: the save took too long beside a collection.
        StorageError: the storage failed.
    """
    fragment = fragment_of(meeting.rank, meeting.plan_key, written, tree, per_rank)
    if meeting.world_size == 1:
        return conclude(meeting, plan.tensors, [fragment], metadata)
    transaction = meeting.transaction_in_storage()
    loop.run(transaction.write_fragment(meeting.rank, encode_fragment(fragment)))
    if not meeting.is_coordinator:
        return loop.run(transaction.await_commit(meeting.run, meeting.step, meeting.deadline_seconds)), None
    contents = loop.run(transaction.collect(meeting.deadline_seconds))
    fragments = decode_fragments(contents)  # by rank
    if [fragment.rank for fragment in fragments] != list(range(meeting.world_size)):
        raise CorruptionError(f"cannot commit {meeting.name}: its fragments say that they are of other ranks")
    check_agreement(fragments, plan.tensors, meeting.world_size)
    outcome = conclude(meeting, plan.tensors, fragments, metadata, written=written)
    with contextlib.suppress(VeScaleError):  # committed: what cannot be removed now, gc removes
        loop.run(transaction.clean())
    return outcome


def conclude(
    meeting: Meeting,
    tensors: Sequence[TensorRecord],
    fragments: Sequence[Fragment],
    metadata: dict[str, Any],
    *,
    shape_tree: Callable[[Node], Node] | None = None,
    written: Written | None = None,
) -> tuple[Ref, Manifest]:
    """Prove that the fragments make a whole snapshot, then make it visible; for the coordinator.

    Args:
        meeting: which transaction.
        tensors: the tensor table that the fragments index.
        fragments: of all ranks that wrote.
        metadata: the user's.
        shape_tree: changes the merged tree before it is stored.
        written: what the coordinator wrote; the packs that it puts here are counted in it.

    Raises:
        MismatchError: the ranks' trees cannot be merged.
        CorruptionError: an element is not written exactly once, or a pack is not there whole.
        ConflictError: the save took so long that a collection may be about to delete what it refers to.
        StorageError: the storage failed.
    """
    settled = settle_shares(meeting.backend, fragments, tensors)
    if written is not None:
        written.count_packs([pack for fragment in settled[len(fragments) :] for pack in fragment.packs])
    chunks, packs = assemble(settled, tensors)
    tree = _whole_tree(fragments)
    now = time.time()
    manifest = Manifest(
        run=meeting.run,
        step=meeting.step,
        created_seconds=now,
        transaction=meeting.transaction,
        world_size=meeting.world_size,
        tree=tree if shape_tree is None else shape_tree(tree),
        tensors=tuple(tensors),
        chunks=chunks,
        packs=packs,
        writer=_writer(),
        metadata=metadata,
    )
    prove_covers(manifest)
    _prove_packs(meeting, manifest, fragments)
    name = store_manifest(meeting.backend, manifest)
    _refuse_marked(meeting, manifest)
    ref = loop.run(
        create_ref(
            meeting.backend,
            meeting.run,
            meeting.step,
            manifest=name,
            transaction=meeting.transaction,
            now=now,
        )
    )
    with contextlib.suppress(VeScaleError):  # committed: a hint that is missing costs bytes and nothing else
        put_hints(meeting.backend, manifest, name)
    return ref, manifest


def _whole_tree(fragments: Sequence[Fragment]) -> Node:
    """Return the tree of all ranks, per-rank values put back."""
    shared = next((fragment.tree for fragment in fragments if fragment.rank == 0), None)
    trees = [(f.rank, f.tree if f.tree is not None else shared) for f in fragments]
    merged = merge_trees([(rank, tree) for rank, tree in trees if tree is not None])
    return fill_per_rank(merged, [(f.rank, f.per_rank) for f in fragments])


def _prove_packs(meeting: Meeting, manifest: Manifest, fragments: Sequence[Fragment]) -> None:
    """Refuse a snapshot whose packs are not in storage with the size that they must have."""
    owner = {pack.name: fragment.rank for fragment in fragments for pack in fragment.packs}

    async def check(number: int) -> str | None:
        pack = manifest.packs[number]
        try:
            size = (await meeting.backend.head(pack_key(pack.name))).size_bytes
        except ObjectNotFoundError:
            return f"{pack_key(pack.name)}, which rank {owner.get(pack.name)} refers to, is not there"
        return None if size == pack.size_bytes else f"{pack_key(pack.name)} has {size} bytes, not {pack.size_bytes}"

    found = loop.run(map_bounded(check, range(len(manifest.packs)), _NUM_REQUESTS))
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise CorruptionError(
            f"cannot commit {meeting.name} to {meeting.backend.url}: {'; '.join(problems[:8])} - was it collected, or "
            "do the ranks see different storage?",
            problems=tuple(problems),
        )


def _refuse_marked(meeting: Meeting, manifest: Manifest) -> None:
    """Refuse a snapshot of packs that a collection marked while this save was under way, if that is too long ago.

    The ranks referred to nothing that was marked when they began. What was marked since then is safe for as long as the
    collection waits; half of that is left as a margin.
    """
    reader = meeting.marks or MarkReader(meeting.backend)
    seconds = time.monotonic() - meeting.began
    marks, _ = loop.run(reader.marks())
    packs = refused(marks, (pack.name for pack in manifest.packs), seconds)
    if packs:
        grace_seconds = min(mark.grace_seconds for mark in marks if not mark.packs.isdisjoint(packs))
        raise ConflictError(
            f"cannot commit {meeting.name} to {meeting.backend.url}: the save took {seconds:.0f} s, and a collection "
            f"that gives saves a grace period of {grace_seconds:.0f} s has marked {len(packs)} of its packs meanwhile, "
            f"among them {pack_key(packs[0])} - save again, and collect with a grace period that is more than twice as "
            "long as any save",
            packs=tuple(packs),
        )


def fragment_of(rank: int, plan_key: bytes, written: Written, tree: Node | None, per_rank: PerRankEntries) -> Fragment:
    """Return what this rank tells the coordinator."""
    return Fragment(
        rank=rank,
        plan_key=plan_key,
        tree=tree,
        per_rank=per_rank,
        chunks=FragmentChunks.of(
            tensor=written.tensor,
            tile=written.tile,
            digest=written.digest,
            pack=written.pack,
            offset=written.offset,
            length=written.length,
            codec=written.codec,
            partial=written.partial,
        ).with_shares(written.shares),
        packs=tuple(written.packs),
        replicas=written.compared,
        counters={"bytes_total": written.bytes_total, "bytes_put": written.bytes_put},
    )


def _writer() -> str:
    try:
        return f"vescale-ckpt {version('vescale-ckpt')}"
    except PackageNotFoundError:
        return "vescale-ckpt"
