"""``export``: a snapshot's tensors as safetensors files, for everything that reads those."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, Final

import torch

from vescale_ckpt.interop.safetensors.export import ExportReport, check_target, export_snapshot
from vescale_ckpt.interop.safetensors.plan import DEFAULT_SHARD_BYTES, ExportOptions, plan_export
from vescale_tools.common import ExitCode, add_url_argument, open_existing, parse_size
from vescale_tools.output import Output, count, format_bytes

if TYPE_CHECKING:
    import argparse

    from vescale_ckpt.interop.safetensors.export import ExportTarget
    from vescale_ckpt.interop.safetensors.plan import ExportPlan

_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument("snapshot", metavar="RUN@STEP", help="or RUN@TAG, or RUN for its newest snapshot")
    parser.add_argument("folder", metavar="DIR", help="where to; made if absent, refused if not empty")
    parser.add_argument(
        "--select",
        metavar="NAME",
        help="export what is below this dotted name, under names relative to it; '' for everything; default: 'model' "
        "where the snapshot has it at its top, else everything",
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(_DTYPES),
        help="cast floating-point tensors of 16 bits and more, as torch does; default: as they are stored",
    )
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=DEFAULT_SHARD_BYTES,
        metavar="SIZE",
        help="start another file when one would grow beyond this (5GB, 500MB, 2GiB); default: 5GB",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the weights that an earlier export left in DIR"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and do nothing")


def run(args: argparse.Namespace) -> int:
    """Export and return the exit code."""
    output = Output.of(args)
    options = ExportOptions(
        select=args.select,
        dtype=None if args.dtype is None else _DTYPES[args.dtype],
        max_shard_bytes=args.max_shard_size,
    )
    target = check_target(args.folder, overwrite=args.overwrite)
    with open_existing(args) as store:
        snapshot = store[args.snapshot]
        plan = plan_export(snapshot.manifest, options)
        if args.dry_run:
            report = None
        else:
            with output.progress(f"export {snapshot.name}", plan.num_bytes) as advance:
                report = export_snapshot(snapshot, plan, target, progress=advance)
    _print(output, plan, target, report)
    output.emit(_as_json(plan, target, report))
    return ExitCode.OK


def _print(output: Output, plan: ExportPlan, target: ExportTarget, report: ExportReport | None) -> None:
    what = f"'{plan.select}' of {plan.snapshot}" if plan.select else plan.snapshot
    verb = "would export" if report is None else "exported"
    num_tensors = sum(len(file.tensors) for file in plan.files)
    output.line(
        f"{verb} {what} to {target.folder}: {count(num_tensors, 'tensor')}, {format_bytes(plan.num_bytes)}"
        + (f", in {report.seconds:.1f} s" if report is not None else "")
    )
    rows = [[file.name, str(len(file.tensors)), format_bytes(file.num_bytes)] for file in plan.files]
    output.table(("file", "tensors", "size"), rows, right=("tensors", "size"))
    if target.removed:
        output.line(f"{'would replace' if report is None else 'replaced'}: {', '.join(target.removed)}")
    output.listed("tied, stored once", [f"{name} = {stored}" for name, stored in plan.ties.items()])
    casts = collections.Counter((_name(tensor.stored), _name(tensor.dtype)) for tensor in plan.casts)
    for (stored, dtype), number in casts.items():
        output.line(f"cast: {count(number, 'tensor')} {stored} -> {dtype}")
    output.listed("left out", [f"{name}: {why}" for name, why in plan.left_out])
    for name, number in ({} if report is None else report.overflowed).items():
        output.warn(f"{name}: {count(number, 'finite value')} became infinite in the cast")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_json(plan: ExportPlan, target: ExportTarget, report: ExportReport | None) -> dict[str, Any]:
    return {
        "snapshot": plan.snapshot,
        "select": plan.select,
        "folder": str(target.folder),
        "dry_run": report is None,
        "bytes": plan.num_bytes,
        "files": [
            {"name": file.name, "bytes": file.num_bytes, "tensors": [tensor.name for tensor in file.tensors]}
            for file in plan.files
        ],
        "replaced": list(target.removed),
        "ties": dict(plan.ties),
        "cast": {t.name: {"from": _name(t.stored), "to": _name(t.dtype)} for t in plan.casts},
        "overflowed": {} if report is None else report.overflowed,
        "left_out": [{"name": name, "why": why} for name, why in plan.left_out],
        "seconds": None if report is None else report.seconds,
    }
