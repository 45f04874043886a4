"""``du``: what runs, snapshots and tensors take in storage, and what sharing saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import SnapshotNotFoundError
from vescale_ckpt.usage import UsageMeter, by_name
from vescale_storage import loop, refs
from vescale_storage.keys import PACKS_PREFIX
from vescale_tools.common import ExitCode, UsageError, add_url_argument, open_existing, parse_count
from vescale_tools.output import Output, count, format_bytes, format_time, iso_time, percent

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vescale_ckpt.store import Store
from vescale_ckpt.usage import SnapshotUsage, Usage

_NUM_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument(
        "what",
        metavar="RUN[@STEP]",
        nargs="?",
        help="a run: by step, shared with other steps of it; a snapshot: by tensor; default: all runs of the store",
    )
    parser.add_argument(
        "--depth",
        type=parse_count,
        metavar="N",
        help="of a snapshot: sum over names of N dotted parts; default: tensors",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"of a snapshot: every line, not only the {_NUM_SHOWN} largest"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and return the exit code."""
    output = Output.of(args)
    name = None if args.what is None else refs.parse_name(args.what)
    is_snapshot = name is not None and (name.step is not None or name.tag is not None)
    if args.depth is not None and not is_snapshot:
        raise UsageError("cannot use --depth without a snapshot: write RUN@STEP")
    with open_existing(args) as store:
        if is_snapshot:
            _tensors(store, args, output)
        elif name is not None:
            _steps(store, name.run, output)
        else:
            _runs(store, output)
    return ExitCode.OK


def measure_runs(store: Store, runs: Sequence[str], output: Output) -> Usage:
    """Return what snapshots of runs take, in the order in which they were committed."""
    infos = sorted(
        (info for name in runs for info in store.snapshots(name)), key=lambda info: (info.created_seconds, info.step)
    )
    meter = UsageMeter()
    with output.counting("measure") as progress:
        for number, info in enumerate(infos, 1):
            try:
                meter.add(store[info.name].manifest, info.version)
            except SnapshotNotFoundError:  # pruned meanwhile
                continue
            progress("manifests read", number)
    return meter.usage()


def _runs(store: Store, output: Output) -> None:
    usage = measure_runs(store, store.runs(), output)
    by_run: dict[str, list[SnapshotUsage]] = {}
    for snapshot in usage.snapshots:
        by_run.setdefault(snapshot.run, []).append(snapshot)
    runs: list[dict[str, Any]] = [
        {
            "run": name,
            "snapshots": len(members),
            "tensor_bytes": sum(each.tensor_bytes for each in members),
            "new_bytes": sum(each.new_bytes for each in members),
        }
        for name, members in sorted(by_run.items())
    ]
    rows = [
        [
            each["run"],
            str(each["snapshots"]),
            format_bytes(each["tensor_bytes"]),
            format_bytes(each["new_bytes"]),
        ]
        for each in runs
    ]
    output.table(
        ("run", "snapshots", "tensors", "stored for it"), rows, right=("snapshots", "tensors", "stored for it")
    )
    packs = loop.run(_pack_sizes(store))
    unneeded = sum(size for name, size in packs.items() if name not in usage.packs)
    sparse = sum(usage.packs.values()) - usage.stored_bytes
    _summary(output, usage)
    output.line(
        f"packs take {format_bytes(sum(packs.values()))}: {format_bytes(unneeded)} in "
        f"{count(sum(name not in usage.packs for name in packs), 'pack')} that no snapshot needs (gc), "
        f"{format_bytes(sparse)} of footers and of chunks that no snapshot needs in packs that one does (repack)"
    )
    output.emit(
        {
            "url": store.url,
            "runs": runs,
            **_totals(usage),
            "packs": len(packs),
            "pack_bytes": sum(packs.values()),
            "unneeded_pack_bytes": unneeded,
            "sparse_bytes": sparse,
        }
    )


def _steps(store: Store, name: str, output: Output) -> None:
    usage = measure_runs(store, [name], output)
    rows = [
        [
            str(each.step),
            format_time(each.created_seconds),
            *(format_bytes(size) for size in (each.tensor_bytes, each.stored_bytes, each.new_bytes, each.own_bytes)),
        ]
        for each in usage.snapshots
    ]
    titles = ("tensors", "stored", "new", "own")
    output.table(("step", "created (UTC)", *titles), rows, right=("step", *titles))
    output.line("new: not in an earlier snapshot of the run; own: in no other one, what deleting it alone sets free")
    _summary(output, usage)
    snapshots = [
        {
            "step": each.step,
            "version": each.version,
            "created": iso_time(each.created_seconds),
            "tensor_bytes": each.tensor_bytes,
            "stored_bytes": each.stored_bytes,
            "new_bytes": each.new_bytes,
            "own_bytes": each.own_bytes,
        }
        for each in usage.snapshots
    ]
    output.emit({"url": store.url, "run": name, "snapshots": snapshots, **_totals(usage)})


def _tensors(store: Store, args: argparse.Namespace, output: Output) -> None:
    snapshot = store[args.what]
    found = by_name(snapshot.manifest, args.depth)
    ordered = sorted(found, key=lambda each: (-each.tensor_bytes, each.name))
    shown = ordered if args.all else ordered[:_NUM_SHOWN]
    total = sum(each.tensor_bytes for each in found)
    rows = [
        [
            format_bytes(each.tensor_bytes),
            percent(each.tensor_bytes, total),
            format_bytes(each.stored_bytes),
            str(each.tensors),
            each.name,
        ]
        for each in shown
    ]
    output.table(("size", "part", "stored", "tensors", "name"), rows, right=("size", "part", "stored", "tensors"))
    if len(shown) < len(ordered):
        output.line(f"and {len(ordered) - len(shown):,} more; --all shows them, --depth sums them up")
    stored = sum(each.stored_bytes for each in found)
    output.line(f"{snapshot.name}: {format_bytes(total)} of tensors, {format_bytes(stored)} stored")
    names = [
        {
            "name": each.name,
            "tensors": each.tensors,
            "tensor_bytes": each.tensor_bytes,
            "stored_bytes": each.stored_bytes,
        }
        for each in ordered
    ]
    output.emit({"snapshot": snapshot.name, "names": names, "tensor_bytes": total, "stored_bytes": stored})


def _summary(output: Output, usage: Usage) -> None:
    output.line(
        f"{count(len(usage.snapshots), 'snapshot')} of {format_bytes(usage.tensor_bytes)} are stored in "
        f"{format_bytes(usage.stored_bytes)}: sharing and compression save {format_bytes(max(usage.saved_bytes, 0))} "
        f"({percent(usage.saved_bytes, usage.tensor_bytes)})"
    )


def _totals(usage: Usage) -> dict[str, Any]:
    return {
        "tensor_bytes": usage.tensor_bytes,
        "stored_bytes": usage.stored_bytes,
        "saved_bytes": usage.saved_bytes,
        "packs_in_use": len(usage.packs),
    }


async def _pack_sizes(store: Store) -> dict[str, int]:
    return {info.key.rpartition("/")[2]: info.size_bytes async for info in store.backend.list(PACKS_PREFIX)}
