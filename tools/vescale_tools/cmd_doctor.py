"""``doctor``: how a store is, and whether its storage keeps the promises that a store is built on."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.diagnosis.checks import Check, Latency, Level
from vescale_ckpt.diagnosis.health import check_health
from vescale_ckpt.diagnosis.storage import try_storage
from vescale_tools.common import ExitCode, add_url_argument, open_existing
from vescale_tools.output import Output, format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_STYLES: Final = {Level.OK: "", Level.NOTE: "yellow", Level.BAD: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="put nothing: look at the store, and do not try the storage; else some objects are put under probe/ and "
        "taken away again",
    )


def run(args: argparse.Namespace) -> int:
    """Examine and return the exit code."""
    output = Output.of(args)
    latencies: list[Latency] = []
    with open_existing(args) as store, output.counting(f"examine {args.url}") as progress:
        capabilities = dataclasses.asdict(store.backend.capabilities)
        checks = check_health(store, now=time.time())
        if not args.dry_run:
            progress("checks", len(checks))
            tried, latencies = try_storage(store.backend)
            checks += tried
    _print(output, checks, latencies, capabilities)
    bad = [check for check in checks if check.level is Level.BAD]
    output.emit(
        {
            "url": args.url,
            "ok": not bad,
            "dry_run": args.dry_run,
            "capabilities": capabilities,
            "checks": [{"name": c.name, "level": str(c.level), "detail": c.detail} for c in checks],
            "latencies": [_latency_json(latency) for latency in latencies],
        }
    )
    return ExitCode.FAILED if bad else ExitCode.OK


def _print(output: Output, checks: Sequence[Check], latencies: Sequence[Latency], capabilities: dict[str, Any]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        output.line(f"{check.level:<4}  {check.name:<{width}}  {check.detail}", _STYLES[check.level])
    output.line(f"says of itself: {', '.join(f'{name} {value}' for name, value in capabilities.items())}")
    if latencies:
        rows = [
            [
                latency.verb,
                str(len(latency.seconds)),
                *(f"{1000 * seconds:.2f} ms" for seconds in (latency.seconds[0], latency.median, latency.seconds[-1])),
                f"{format_bytes(round(latency.bytes_per_second))}/s" if latency.num_bytes > 1 << 20 else "",
            ]
            for latency in latencies
        ]
        titles = ("requests", "least", "median", "most", "speed")
        output.line()
        output.table(("verb", *titles), rows, right=titles)


def _latency_json(latency: Latency) -> dict[str, Any]:
    return {
        "verb": latency.verb,
        "bytes": latency.num_bytes,
        "requests": len(latency.seconds),
        "least_seconds": latency.seconds[0],
        "median_seconds": latency.median,
        "most_seconds": latency.seconds[-1],
    }
