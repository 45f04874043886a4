"""``mirror``: makes the snapshots of one store be in another one too; what is there is not copied again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vescale_ckpt.mirroring.mirror import Mirrored, Mirroring
from vescale_ckpt.store import open_store
from vescale_tools.common import (
    OPTIONS_VARIABLE,
    ExitCode,
    add_dry_run_argument,
    add_url_argument,
    open_existing,
    options_of,
    storage_options,
)
from vescale_tools.output import Output, count, format_bytes

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument("target", metavar="TARGET", help="the store to copy to; made if nothing is there")
    parser.add_argument("--run", metavar="RUN", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument(
        "--to-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="as --storage-option, for TARGET; default: those of URL, where both are of the same kind of storage",
    )
    add_dry_run_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Mirror and return the exit code."""
    output = Output.of(args)
    with open_existing(args) as source, open_store(args.target, storage_options=_target_options(args)) as target:
        mirroring = Mirroring(source, target)
        plan = mirroring.plan(args.run, dry_run=args.dry_run)
        result = Mirrored(plan, dry_run=True)
        if not args.dry_run:
            with output.progress(f"mirror {args.url}", plan.num_bytes) as advance:
                result = mirroring.execute(plan, advance)
    _print(output, result, args.target)
    output.emit(_as_json(result, args.url, args.target))
    if result.failed:
        return ExitCode.DAMAGED if not result.plan.conflicts else ExitCode.CONFLICT
    return ExitCode.OK if result.is_whole else ExitCode.CONFLICT


def _target_options(args: argparse.Namespace) -> dict[str, Any]:
    if args.to_option:
        return storage_options(args.to_option, os.environ.get(OPTIONS_VARIABLE))
    same_kind = args.url.partition("://")[0] == args.target.partition("://")[0] and "://" in args.url
    return options_of(args) if same_kind or ("://" not in args.url and "://" not in args.target) else {}


def _print(output: Output, result: Mirrored, target: str) -> None:
    plan = result.plan
    rows = [
        [f"{copy.ref.run}@{copy.ref.step}", f"{len(copy.packs):,}", format_bytes(copy.num_bytes)]
        for copy in plan.copies
    ]
    if rows:
        output.table(("snapshot", "packs", "to copy"), rows, right=("packs", "to copy"))
    if result.dry_run:
        output.line(
            f"would copy {count(len(plan.copies), 'snapshot')} and {count(len(plan.tags), 'tag')} to {target}: "
            f"{count(plan.num_packs, 'pack')}, {format_bytes(plan.num_bytes)}; {len(plan.present)} are there already"
        )
    else:
        output.line(
            f"copied {count(len(result.snapshots), 'snapshot')} and {count(len(result.tags), 'tag')} to {target}: "
            f"{count(result.packs.num, 'pack')}, {format_bytes(result.packs.size_bytes)} in {result.seconds:.1f} s; "
            f"{len(plan.present)} were there already"
        )
    for text in plan.conflicts:
        output.warn(f"{text}; it stays as it is")
    for text in plan.held_back:
        output.warn(f"{text}: a collection of the target is about to delete some of its packs; call again after that")
    for text in result.failed:
        output.warn(f"not copied: {text}")


def _as_json(result: Mirrored, source: str, target: str) -> dict[str, Any]:
    plan = result.plan
    return {
        "source": source,
        "target": target,
        "dry_run": result.dry_run,
        "plan": {
            "snapshots": [
                {"name": f"{copy.ref.run}@{copy.ref.step}", "packs": len(copy.packs), "bytes": copy.num_bytes}
                for copy in plan.copies
            ],
            "tags": [f"{tag.ref.run}@{tag.name}" for tag in plan.tags],
            "packs": plan.num_packs,
            "bytes": plan.num_bytes,
            "present": [f"{ref.run}@{ref.step}" for ref in plan.present],
        },
        "snapshots": result.snapshots,
        "tags": result.tags,
        "packs": result.packs.num,
        "bytes": result.packs.size_bytes,
        "conflicts": list(plan.conflicts),
        "held_back": list(plan.held_back),
        "failed": result.failed,
        "whole": result.is_whole,
        "seconds": result.seconds,
    }
