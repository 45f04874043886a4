"""What ``gc`` and ``repack`` print of a collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_storage.collect.plan import Tally
from vescale_tools.output import count, format_bytes, format_seconds, format_time, iso_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_ckpt.collecting.gc import GcReport
    from vescale_ckpt.collecting.repack import Repacked
    from vescale_storage.collect.plan import CollectionPlan
    from vescale_storage.collect.sweep import Collection
    from vescale_tools.output import Output

_NUM_LISTED = 20


def print_report(output: Output, report: GcReport) -> None:
    """Print what a collection found, and what it did or would do."""
    if report.repacked is not None:
        for line in _repacked_lines(report.repacked):
            output.line(line)
    collection = report.collection
    plan = collection.plan
    output.line(
        f"in use by {count(plan.num_refs, 'ref')} and {count(plan.num_tags, 'tag')}: "
        f"{_tally(plan.live_packs, 'pack')}, {_tally(plan.live_manifests, 'manifest')}"
    )
    output.table(("what", "objects", "size", ""), list(_rows(collection)), right=("objects", "size"))
    for line in _notes(plan):
        output.line(line)
    for text in (*plan.strange, *plan.damaged_marks)[:_NUM_LISTED]:
        output.warn(f"{text}: no object of this version, or damaged; see FORMAT.md, Collection")


def _rows(collection: Collection) -> Iterator[list[str]]:
    plan, done = collection.plan, collection.done
    now = collection.dry_run
    grace = format_seconds(plan.grace_seconds)
    deleted = plan.deletable if now else done.deleted
    yield _row("would be deleted" if now else "deleted", deleted, "marked a grace period ago, still not needed")
    if plan.grace_seconds:
        marked = Tally.of(plan.to_mark) if now else done.marked
        yield _row("would be marked" if now else "marked", marked, f"to be deleted {grace} from now")
    yield _row("marked before", plan.waiting, "their grace period is not over")
    yield _row("too young", plan.young, f"not needed, but younger than {grace}: a save may be under way")
    for what, planned, gone in (
        ("dead saves", Tally.of(plan.transactions), done.transactions),
        ("leftovers of puts", Tally.of(plan.leftovers), done.leftovers),
        ("index objects", Tally.of(plan.hints), done.hints),
    ):
        yield _row(what, planned if now else gone, "would be removed" if now else "removed")
    if done.unfinished.num:
        yield _row("left for the next time", done.unfinished, "the grace period was over before their turn came")


def _notes(plan: CollectionPlan) -> Iterator[str]:
    if plan.next_due_seconds is not None:
        yield f"the first of what is marked can go after {format_time(plan.next_due_seconds)} UTC: call gc again then"
    if plan.is_empty:
        yield "there is nothing to do"


def _repacked_lines(repacked: Repacked) -> Iterator[str]:
    plan = repacked.plan
    verb = "would be rewritten" if repacked.dry_run else "rewritten"
    yield (
        f"repacking: {count(len(plan.packs), 'pack')} of which less than half is needed, in "
        f"{count(len(plan.refs), 'snapshot')}, {verb}; {format_bytes(plan.reclaimed_bytes)} of them can go"
    )
    if plan.pinned.num:
        yield f"  {_tally(plan.pinned, 'pack')} stay: a tag, an older version or a young snapshot needs it"
    if not repacked.dry_run:
        yield f"  copied {_tally(repacked.copied, 'chunk')} into {_tally(repacked.written, 'new pack')}"
    for text in (*repacked.skipped, *(f"pack {name} is damaged and stays" for name in repacked.damaged)):
        yield f"  {text}"


def _row(what: str, tally: Tally, note: str) -> list[str]:
    return [what, f"{tally.num:,}", format_bytes(tally.size_bytes), note]


def _tally(tally: Tally, noun: str) -> str:
    return f"{count(tally.num, noun)} ({format_bytes(tally.size_bytes)})"


def as_json(report: GcReport) -> dict[str, Any]:
    """Return a collection for ``--json``."""
    plan, done = report.collection.plan, report.collection.done
    return {
        "dry_run": report.dry_run,
        "grace_seconds": plan.grace_seconds,
        "refs": plan.num_refs,
        "tags": plan.num_tags,
        "live": {"packs": _json(plan.live_packs), "manifests": _json(plan.live_manifests)},
        "plan": {
            "delete": [each.key for due in plan.due for each in due.objects],
            "mark": [each.key for each in plan.to_mark],
            "waiting": _json(plan.waiting),
            "young": _json(plan.young),
            "transactions": [each.id for each in plan.transactions],
            "leftovers": [each.name for each in plan.leftovers],
            "index": [each.key for each in plan.hints],
            "next_due": None if plan.next_due_seconds is None else iso_time(plan.next_due_seconds),
            "strange": list(plan.strange),
            "damaged_marks": list(plan.damaged_marks),
        },
        "done": {
            "deleted": {"packs": _json(done.packs), "manifests": _json(done.manifests)},
            "marked": _json(done.marked),
            "unfinished": _json(done.unfinished),
            "transactions": _json(done.transactions),
            "leftovers": _json(done.leftovers),
            "index": _json(done.hints),
            "seconds": done.seconds,
        },
        "repack": None if report.repacked is None else _repacked_json(report.repacked),
    }


def _repacked_json(repacked: Repacked) -> dict[str, Any]:
    plan = repacked.plan
    return {
        "packs": [{"name": pack.name, "bytes": pack.size_bytes, "live_bytes": pack.live_bytes} for pack in plan.packs],
        "would_rewrite": [f"{ref.run}@{ref.step}" for ref in plan.refs],
        "pinned": _json(plan.pinned),
        "reclaimed_bytes": plan.reclaimed_bytes,
        "rewritten": list(repacked.snapshots),
        "skipped": list(repacked.skipped),
        "damaged": list(repacked.damaged),
        "copied": _json(repacked.copied),
        "written": _json(repacked.written),
    }


def _json(tally: Tally) -> dict[str, int]:
    return {"objects": tally.num, "bytes": tally.size_bytes}
