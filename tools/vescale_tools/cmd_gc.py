"""``gc``: collects what no snapshot and no tag needs, in two calls a grace period apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_storage.collect.marks import DEFAULT_GRACE_SECONDS
from vescale_tools.collection import as_json, print_report
from vescale_tools.common import ExitCode, add_dry_run_argument, add_url_argument, open_existing, parse_duration
from vescale_tools.output import Output

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    add_grace_argument(parser)
    parser.add_argument(
        "--repack", action="store_true", help="first rewrite packs of which less than half is needed, as repack does"
    )
    add_dry_run_argument(parser)


def add_grace_argument(parser: argparse.ArgumentParser) -> None:
    """Add the grace period."""
    parser.add_argument(
        "--grace",
        type=parse_duration,
        default=DEFAULT_GRACE_SECONDS,
        metavar="TIME",
        help="what is not needed is marked now and deleted by a call this much later (24h, 90m, 7d); more than twice "
        "as long as any save takes; 0 deletes at once, right only where nobody else uses the store; default: 24h",
    )


def run(args: argparse.Namespace) -> int:
    """Collect and return the exit code."""
    return collect(args, repack=args.repack)


def collect(args: argparse.Namespace, *, repack: bool) -> int:
    """Collect, print, and return the exit code."""
    output = Output.of(args)
    with open_existing(args) as store, output.counting("collecting") as progress:
        report = store.gc(args.grace, dry_run=args.dry_run, repack=repack, progress=progress)
    print_report(output, report)
    output.emit(as_json(report))
    return ExitCode.OK
