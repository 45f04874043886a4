"""``report``: one self-contained page about a run: bytes and sharing, tensors, shards, seconds, loss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from vescale_ckpt.errors import AlreadyExistsError
from vescale_tools.common import ExitCode, add_dry_run_argument, add_url_argument, open_existing
from vescale_tools.meshes import parse_mesh
from vescale_tools.output import Output, count, format_bytes
from vescale_tools.report.gather import gather
from vescale_tools.report.page import render

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument("run", metavar="RUN", help="whose snapshots")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write the page")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        metavar="AXIS=N,...",
        help="the ranks of the shard map, as for explain; default: fsdp over as many ranks as saved, or 4",
    )
    parser.add_argument("--plan", metavar="FILE", help="placements for the mesh, as for explain")
    parser.add_argument(
        "--loss",
        metavar="NAME",
        help="the plain value or metadata that is the loss: a number in each snapshot, or a list; default: one that is "
        "called so",
    )
    add_dry_run_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page and return the exit code."""
    output = Output.of(args)
    target = Path(args.output)
    if target.exists() and not args.overwrite:
        raise AlreadyExistsError(f"cannot write {target}: it exists; pass --overwrite, or choose another name")
    with open_existing(args) as store, output.counting(f"report on {args.run}") as progress:
        report = gather(store, args.run, mesh=args.mesh, plan=args.plan, loss=args.loss, progress=progress)
    page = render(report, now=time.time())
    if not args.dry_run:
        target.write_text(page, encoding="utf-8")
    num_bytes = len(page.encode())
    output.line(
        f"{'would write' if args.dry_run else 'wrote'} {target}: {count(len(report.usage.snapshots), 'snapshot')}, "
        f"{format_bytes(num_bytes)}"
    )
    output.emit(
        {
            "run": report.run,
            "file": str(target),
            "bytes": num_bytes,
            "dry_run": args.dry_run,
            "snapshots": len(report.usage.snapshots),
            "newest": report.newest,
            "loss": report.loss_name or None,
            "phases": sorted({phase for _, each in report.seconds for phase in each}),
            "mesh": dict(zip(report.mesh.names, report.mesh.shape, strict=True)),
        }
    )
    return ExitCode.OK
