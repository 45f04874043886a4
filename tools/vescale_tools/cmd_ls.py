"""``ls``: the runs of a store, or the snapshots of a run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import FormatError, SnapshotNotFoundError, VeScaleError
from vescale_storage import loop, refs
from vescale_tools.common import ExitCode, add_url_argument, exit_code_of, open_existing
from vescale_tools.output import Output, format_bytes, format_time, iso_time
from vescale_tools.sizes import Totals, totals

if TYPE_CHECKING:
    import argparse

    from vescale_ckpt.store import SnapshotInfo, Store

_NUM_MANIFESTS = 8
"""Read at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument("run", metavar="RUN", nargs="?", help="list the snapshots of this run; default: list the runs")
    parser.add_argument("--no-size", action="store_true", help="do not read manifests: faster, without sizes")


def run(args: argparse.Namespace) -> int:
    """List and return the exit code."""
    output = Output.of(args)
    with open_existing(args) as store:
        if args.run is None:
            return _list_runs(store, output)
        return _list_snapshots(store, args.run, output, with_sizes=not args.no_size)


def _list_runs(store: Store, output: Output) -> int:
    errors: list[VeScaleError] = []
    runs = [_describe_run(store, name, errors) for name in store.runs()]
    rows = [
        [run["run"], str(run["snapshots"]), str(run["newest_step"]), _time_of(run["created_seconds"])] for run in runs
    ]
    if rows:
        output.table(("run", "snapshots", "newest step", "created (UTC)"), rows, right=("snapshots", "newest step"))
    else:
        output.line(f"{store.url} is a store without any run")
    output.emit({"url": store.url, "runs": runs})
    return _report(errors, output)


def _describe_run(store: Store, name: str, errors: list[VeScaleError]) -> dict[str, Any]:
    steps = {key.step for key in loop.run(refs.list_ref_keys(store.backend, name))}
    seconds = None
    try:
        newest = store.newest(name)
        seconds = None if newest is None else newest.created_seconds
    except FormatError as error:  # the other runs are listed all the same
        errors.append(error)
    return {
        "run": name,
        "snapshots": len(steps),
        "newest_step": max(steps, default=None),
        "created_seconds": seconds,
        "created": None if seconds is None else iso_time(seconds),
    }


def _list_snapshots(store: Store, name: str, output: Output, *, with_sizes: bool) -> int:
    infos = store.snapshots(name)
    errors: list[VeScaleError] = []
    sizes: list[Totals | None] = [None] * len(infos)
    if with_sizes:
        with ThreadPoolExecutor(_NUM_MANIFESTS, thread_name_prefix="vescale-ls") as workers:
            sizes = list(workers.map(lambda info: _size_of(store, info, errors), infos))
    rows = [
        [
            str(info.step),
            format_time(info.created_seconds),
            "?" if size is None else format_bytes(size.bytes),
            "?" if size is None else str(size.tensors),
            ", ".join(info.tags),
        ]
        for info, size in zip(infos, sizes, strict=True)
    ]
    output.table(("step", "created (UTC)", "size", "tensors", "tags"), rows, right=("step", "size", "tensors"))
    snapshots = [_as_json(info, size) for info, size in zip(infos, sizes, strict=True)]
    output.emit({"url": store.url, "run": name, "snapshots": snapshots})
    return _report(errors, output)


def _size_of(store: Store, info: SnapshotInfo, errors: list[VeScaleError]) -> Totals | None:
    """Return the sums of a snapshot, or None for one that is damaged: the others are listed all the same."""
    try:
        return totals(store[info.name].manifest)
    except (FormatError, SnapshotNotFoundError) as error:  # the latter was removed meanwhile
        errors.append(error)
        return None


def _report(errors: list[VeScaleError], output: Output) -> int:
    for error in errors:
        output.warn(str(error))
    return exit_code_of(errors[0]) if errors else ExitCode.OK


def _as_json(info: SnapshotInfo, size: Totals | None) -> dict[str, Any]:
    return {
        "name": info.name,
        "step": info.step,
        "version": info.version,
        "created_seconds": info.created_seconds,
        "created": iso_time(info.created_seconds),
        "tags": list(info.tags),
        "tensors": None if size is None else size.tensors,
        "bytes": None if size is None else size.bytes,
        "stored_bytes": None if size is None else size.stored_bytes,
    }


def _time_of(seconds: float | None) -> str:
    return "damaged" if seconds is None else format_time(seconds)
