"""``cat``: prints a value, or a slice of a tensor, as text or as a ``.npy`` file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from vescale_ckpt.errors import AlreadyExistsError, NotFoundError
from vescale_ckpt.selection import box_of
from vescale_ckpt.state.tree import ValueNode, fqn, shorten, walk
from vescale_tools.common import (
    ExitCode,
    UsageError,
    add_snapshot_argument,
    add_url_argument,
    open_existing,
    parse_count,
)
from vescale_tools.output import Output, count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from vescale_ckpt.snapshot import Snapshot

_INDEX: Final = re.compile(r"(?P<name>.*?)(?:\[(?P<index>[-0-9:,\s]*)\])?", re.DOTALL)
_MOST_NUMBERS: Final = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    add_snapshot_argument(parser)
    parser.add_argument(
        "name",
        metavar="NAME[SLICE]",
        help="a dotted name, with a slice such as [3], [0:4], [:,-2:] or none for all of it",
    )
    parser.add_argument(
        "--npy", metavar="FILE", help="write a .npy file there instead of text, '-' for standard output"
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="with --npy: as float32, which numpy has and bfloat16 and float8 it has not",
    )
    parser.add_argument(
        "--most",
        type=parse_count,
        default=_MOST_NUMBERS,
        metavar="N",
        help=f"refuse to print more numbers than this as text; default: {_MOST_NUMBERS:,}",
    )


def run(args: argparse.Namespace) -> int:
    """Print and return the exit code."""
    output = Output.of(args)
    if args.npy == "-" and args.json:
        raise UsageError("cannot write an object and a .npy file to standard output: leave out --json, or name a file")
    with open_existing(args) as store:
        snapshot = store[args.snapshot]
        name, index = (args.name, None) if args.name in snapshot.manifest.by_fqn else parse_index(args.name)
        value = _value(snapshot, name)
        if value is not None:
            if index is not None or args.npy is not None:
                raise UsageError(f"cannot slice {name!r}: it is a plain value, not a tensor")
            output.line(shorten(value.value, 1 << 20))
            plain = value.value if type(value.value) in {bool, int, float, str, type(None)} else shorten(value.value)
            output.emit({"snapshot": snapshot.name, "name": name, "type": type(value.value).__name__, "value": plain})
            return ExitCode.OK
        record = snapshot.manifest.tensors[snapshot.manifest.find(name)]
        box = box_of(index, record.shape, name)
        if args.npy is None and box.volume > args.most:
            raise UsageError(
                f"cannot print {box.volume:,} numbers of {name!r} {record.shape} as text: at most {args.most:,}; take "
                "a slice, raise --most, or write --npy FILE"
            )
        tensor = snapshot.read(name, box)
    described = {
        "snapshot": snapshot.name,
        "name": name,
        "dtype": record.dtype,
        "shape": list(tensor.shape),
        "offset": list(box.offset),
    }
    if args.npy is not None:
        _write_npy(args.npy, tensor, as_float32=args.float32)
        if args.npy != "-":
            output.line(f"wrote {record.dtype} {tuple(tensor.shape)} of {name} to {args.npy}")
        output.emit({**described, "file": args.npy})
        return ExitCode.OK
    if not output.as_json:
        for line in text_lines(tensor):
            output.line(line)
    output.emit({**described, "values": printable_tensor(tensor).tolist()})
    return ExitCode.OK


def parse_index(text: str) -> tuple[str, tuple[slice, ...] | None]:
    """Return (name, slices or None) of ``name[0:2,5]``; a number keeps its dim, of size one.

    Raises:
        UsageError: the slice cannot be understood.
    """
    match = _INDEX.fullmatch(text)
    name, inside = (match["name"], match["index"]) if match else (text, None)
    if inside is None:
        return text, None
    try:
        return name, tuple(_slice(part.strip()) for part in inside.split(","))
    except ValueError:
        raise UsageError(f"cannot read the slice [{inside}] of {name!r}: write [3], [0:4] or [:,-2:]") from None


def _slice(part: str) -> slice:
    if ":" not in part:
        at = int(part)
        return slice(at, at + 1 if at != -1 else None)
    start, stop = part.split(":")
    return slice(int(start) if start else None, int(stop) if stop else None)


def _value(snapshot: Snapshot, name: str) -> ValueNode | None:
    """Return the plain value with this name; None where a tensor has it.

    Raises:
        NotFoundError: nothing has it.
    """
    if name in snapshot.manifest.by_fqn:
        return None
    below = []
    for path, node in walk(snapshot.manifest.tree):
        if isinstance(node, ValueNode) and fqn(path) == name:
            return node
        if path and fqn(path).startswith(f"{name}."):
            below.append(fqn(path))
    more = f"; below it are {', '.join(below[:5])}" if below else ""
    raise NotFoundError(f"cannot print {name!r} of {snapshot.name}: no tensor or value has this name{more}", fqn=name)


def printable_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a dtype whose items Python can show, with the same values.

    Raises:
        UsageError: there is none.
    """
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.to(torch.complex128))
    if not tensor.dtype.is_floating_point:
        return tensor
    try:
        return tensor.to(torch.float64)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"cannot print {tensor.dtype}: torch cannot convert it; export the tensor instead") from error


def text_lines(tensor: torch.Tensor) -> Iterator[str]:
    """Yield a tensor as text: a line for each row of the last dim, between planes an empty line."""
    flat = printable_tensor(tensor)
    if tensor.dtype.is_complex:
        rows = [
            [f"{real:g}{imag:+g}j" for real, imag in row] for row in flat.reshape(-1, max(_last(tensor), 1), 2).tolist()
        ]
    else:
        form = "{:g}" if tensor.dtype.is_floating_point else "{}"
        digits = "{:.9g}" if tensor.dtype in {torch.float32, torch.float64} else form
        rows = [[digits.format(item) for item in row] for row in flat.reshape(-1, max(_last(tensor), 1)).tolist()]
    plane = tensor.shape[-2] if tensor.ndim > 2 else len(rows) + 1
    for number, row in enumerate(rows):
        if number and number % max(plane, 1) == 0:
            yield ""
        yield " ".join(row)
    if not rows:
        yield f"({count(0, 'number')})"


def _last(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.ndim else 1


def _write_npy(where: str, tensor: torch.Tensor, *, as_float32: bool) -> None:
    """Write a ``.npy`` file that was not there before.

    Raises:
        UsageError: numpy has no such dtype.
        AlreadyExistsError: the file is there.
    """
    array: np.ndarray[Any, Any]
    try:
        array = (tensor.to(torch.float32) if as_float32 else tensor).numpy()
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"cannot write {tensor.dtype} as .npy: numpy has no such type; add --float32") from error
    if where == "-":
        np.save(sys.stdout.buffer, array, allow_pickle=False)
        return
    try:
        with Path(where).open("xb") as file:
            np.save(file, array, allow_pickle=False)
    except FileExistsError as error:
        raise AlreadyExistsError(f"cannot write {where}: it exists; remove it, or choose another name") from error
