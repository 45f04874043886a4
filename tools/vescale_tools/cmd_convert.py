"""``convert``: a checkpoint of any format that is read, as any format that is written."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.convert.job import LAYOUTS
from vescale_ckpt.interop.convert.options import DEFAULT_BUDGET_BYTES
from vescale_ckpt.interop.foreign.detect import FORMATS
from vescale_ckpt.interop.keymap.rules import shipped_keymaps
from vescale_tools.common import OPTIONS_VARIABLE, ExitCode, parse_count, parse_size, storage_options
from vescale_tools.output import Output, count, format_bytes

if TYPE_CHECKING:
    from vescale_ckpt.interop.convert.options import ConvertReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    parser.add_argument("source", metavar="SOURCE", help="a path or fsspec URL; of a store: URL#RUN@STEP")
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a path or fsspec URL that is not there yet; NAME.safetensors, NAME.pt and NAME.npz are one file, "
        "NAME.zarr is a zarr group, any other a folder",
    )
    parser.add_argument(
        "--from", dest="source_format", choices=sorted((*FORMATS, "vescale")), help="what SOURCE is; default: look"
    )
    parser.add_argument(
        "--to",
        dest="target_format",
        choices=sorted(LAYOUTS),
        help="default: by TARGET's name; safetensors for a folder",
    )
    parser.add_argument(
        "--keymap",
        metavar="MAP",
        help=f"rename, fuse, split, transpose, drop and cast: a file (FILE.toml, FILE.json, FILE.toml:B->A), or one of "
        f"{', '.join(shipped_keymaps())}",
    )
    parser.add_argument(
        "--set", action="append", default=[], type=_setting, metavar="NAME=NUMBER", help="a number that MAP needs"
    )
    parser.add_argument(
        "--budget", type=parse_size, default=DEFAULT_BUDGET_BYTES, metavar="SIZE", help="of memory; default: 512MiB"
    )
    parser.add_argument("--workers", type=parse_count, default=1, metavar="N", help="processes; default: 1")
    parser.add_argument(
        "--max-shard-size", type=parse_size, metavar="SIZE", help="start another file when one would grow beyond this"
    )
    parser.add_argument("--no-resume", action="store_true", help="begin anew where an interrupted conversion is found")
    parser.add_argument(
        "--target-storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="as --storage-option, which is for SOURCE; default: the same",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and do nothing")


def run(args: argparse.Namespace) -> int:
    """Convert and return the exit code; under torchrun every rank writes its share of the files."""
    output = Output.of(args)
    variable = os.environ.get(OPTIONS_VARIABLE)
    source_options = storage_options(args.storage_option, variable)
    share = (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    options: dict[str, Any] = {
        "keymap": args.keymap,
        "settings": dict(args.set),
        "source_format": args.source_format,
        "target_format": args.target_format,
        "budget_bytes": args.budget,
        "workers": args.workers,
        "resume": not args.no_resume,
        "max_shard_bytes": args.max_shard_size,
        "source_options": source_options,
        "target_options": storage_options(args.target_storage_option, variable)
        if args.target_storage_option
        else source_options,
    }
    planned = convert(args.source, args.target, **options, dry_run=True) if args.dry_run else None
    if planned is None:
        with output.progress(f"convert {args.source}", 0) as advance:
            report = convert(args.source, args.target, **options, share=share, progress=advance)
    else:
        report = planned
    if share[0] == 0:
        _print(output, report, is_done=planned is None)
        output.emit(_as_json(report, is_done=planned is None))
    return ExitCode.OK


def _setting(text: str) -> tuple[str, int]:
    name, equals, number = text.partition("=")
    if not equals or not name or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no setting; write NAME=NUMBER")
    return name, int(number)


def _print(output: Output, report: ConvertReport, *, is_done: bool) -> None:
    verb = "converted" if is_done else "would convert"
    output.line(
        f"{verb} {report.source} ({report.source_format}) to {report.target} ({report.target_format}): "
        f"{count(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)} in {count(len(report.files), 'file')}"
        + (f", in {report.seconds:.1f} s" if is_done else "")
    )
    if report.bytes_resumed:
        output.line(f"found from an interrupted conversion: {format_bytes(report.bytes_resumed)}")
    if is_done:
        output.line(f"largest resident size of a process: {format_bytes(report.peak_rss_bytes)}")
    output.listed("carried along", list(report.carried))
    output.listed("left out", [f"{name}: {why}" for name, why in report.left_out])
    output.listed("notes", list(report.notes))
    for name, number in report.overflowed.items():
        output.warn(f"{name}: {count(number, 'finite value')} became infinite in the cast")


def _as_json(report: ConvertReport, *, is_done: bool) -> dict[str, Any]:
    return {
        "source": {"url": report.source, "format": report.source_format},
        "target": {"url": report.target, "format": report.target_format},
        "dry_run": not is_done,
        "tensors": report.num_tensors,
        "bytes": report.num_bytes,
        "bytes_resumed": report.bytes_resumed,
        "files": list(report.files),
        "carried": list(report.carried),
        "left_out": [{"name": name, "why": why} for name, why in report.left_out],
        "notes": list(report.notes),
        "overflowed": report.overflowed,
        "peak_rss_bytes": report.peak_rss_bytes if is_done else None,
        "seconds": report.seconds if is_done else None,
    }
