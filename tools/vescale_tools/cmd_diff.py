"""``diff``: compares two checkpoints, of one store, of two, or of another library: structure and values."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ckpt.compare.checkpoints import Comparison, TensorDiff, Verdict, compare
from vescale_ckpt.compare.sides import Side, side_of_foreign, side_of_snapshot
from vescale_ckpt.interop.foreign.detect import open_foreign
from vescale_ckpt.state.tree import shorten
from vescale_ckpt.store import open_store
from vescale_tools.common import ExitCode, UsageError, options_of
from vescale_tools.output import Output, count, format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vescale_ckpt.compare.sides import Described

_MEANINGS = {
    Verdict.SAME: "the same",
    Verdict.EQUAL: "equal values, other bits or another dtype",
    Verdict.DIFFERENT: "other values",
    Verdict.SHAPE: "other shapes",
    Verdict.ONLY_A: "only in A",
    Verdict.ONLY_B: "only in B",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    parser.add_argument(
        "sides",
        metavar="A B",
        nargs="+",
        help="'URL RUN@STEP RUN@STEP' of one store, 'URL RUN@STEP URL RUN@STEP' of two; for either side also the path "
        "or URL, with a slash in it, of another library's checkpoint (safetensors, DCP, ...): 'URL RUN@STEP ./dir'",
    )
    parser.add_argument("--below-a", metavar="NAME", default="", help="of A compare what is below this dotted name")
    parser.add_argument("--below-b", metavar="NAME", default="", help="likewise of B")
    parser.add_argument(
        "--quick", action="store_true", help="read no values: what digests do not show to be the same is different"
    )
    parser.add_argument("--all", action="store_true", help="list also what is the same")
    parser.add_argument("--exit-code", action="store_true", help="end with 1 if anything is not the same")


def run(args: argparse.Namespace) -> int:
    """Compare and return the exit code."""
    output = Output.of(args)
    first, second = parse_sides(args.sides)
    with contextlib.ExitStack() as stack:
        a = _open(first, args, stack).below(args.below_a)
        b = _open(second, args, stack).below(args.below_b)
        total = sum(tensor.num_bytes for tensor in a.tensors.values())
        with output.progress(f"compare {a.name}", total) as advance:
            comparison = compare(a, b, read=not args.quick, progress=advance)
    _print(output, comparison, everything=args.all)
    output.emit(_as_json(comparison))
    return ExitCode.FAILED if args.exit_code and not comparison.are_same else ExitCode.OK


def parse_sides(words: Sequence[str]) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    """Return (url, snapshot) of both sides; the snapshot is None for another library's checkpoint.

    Raises:
        UsageError: these are not two sides.
    """
    sides: list[tuple[str, str | None]] = []
    url: str | None = None
    for word in words:
        if "/" in word or "\\" in word or (not sides and url is None) or Path(word).exists():  # no run has a slash
            if url is not None:
                sides.append((url, None))
            url = word
        else:
            sides.append((url or sides[-1][0], word))
            url = None
    if url is not None:
        sides.append((url, None))
    if len(sides) != 2:
        raise UsageError(
            f"cannot compare {' '.join(words)!r}: expected two sides, found {len(sides)}; write URL RUN@STEP RUN@STEP, "
            "URL RUN@STEP URL RUN@STEP, or a path with a slash for another library's checkpoint; see vescale-ckpt diff "
            "--help"
        )
    return sides[0], sides[1]


def _open(side: tuple[str, str | None], args: argparse.Namespace, stack: contextlib.ExitStack) -> Side:
    url, name = side
    if name is None:
        foreign = open_foreign(url, storage_options=options_of(args))
        stack.callback(foreign.close)
        return side_of_foreign(foreign)
    store = stack.enter_context(open_store(url, storage_options=options_of(args), create=False))
    return side_of_snapshot(store[name])


def _print(output: Output, comparison: Comparison, *, everything: bool) -> None:
    shown = [diff for diff in comparison.tensors if everything or diff.verdict is not Verdict.SAME]
    if shown:
        titles = ("different", "max abs", "max rel")
        output.table(("tensor", "is", *titles, ""), [_row(diff) for diff in shown], right=titles)
    rows = [
        [value.name, str(value.verdict), *(["" if v is None else shorten(v) for v in (value.a, value.b)])]
        for value in comparison.values
    ]
    if rows:
        output.table(("value", "is", "A", "B"), rows)
    counts = {verdict: comparison.count(verdict) for verdict in Verdict}
    output.line(
        f"A is {comparison.a}, B is {comparison.b}; of {count(len(comparison.tensors), 'tensor')}: "
        + (", ".join(f"{number:,} {_MEANINGS[verdict]}" for verdict, number in counts.items() if number) or "none")
    )
    output.line(
        f"{len(comparison.values)} of {count(comparison.num_values, 'plain value')} "
        f"{'is' if len(comparison.values) == 1 else 'are'} not the same; {format_bytes(comparison.bytes_read)} of "
        "values were read, the rest is known from digests"
    )


def _row(diff: TensorDiff) -> list[str]:
    found = diff.difference
    cells = ["", "", ""]
    if found is not None and found.num_different:
        cells = [f"{found.num_different:,} of {found.num:,}", f"{found.max_abs:.3g}", f"{found.max_rel:.3g}"]
    return [diff.name, str(diff.verdict), *cells, _note(diff)]


def _note(diff: TensorDiff) -> str:
    a, b = diff.a, diff.b
    notes = []
    if a is not None and b is not None:
        if a.shape != b.shape:
            notes.append(f"{a.shape} and {b.shape}")
        if a.dtype != b.dtype:
            notes.append(f"{_dtype(a)} and {_dtype(b)}")
        if a.alias_of != b.alias_of:
            notes.append(f"tied to {a.alias_of or 'nothing'} and to {b.alias_of or 'nothing'}")
    else:
        only = a or b
        notes.append("" if only is None else f"{_dtype(only)} {only.shape}")
    if diff.difference is not None and diff.difference.at is not None:
        notes.append(f"most at {list(diff.difference.at)}")
    return "; ".join(notes)


def _dtype(tensor: Described) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "a": comparison.a,
        "b": comparison.b,
        "same": comparison.are_same,
        "bytes_read": comparison.bytes_read,
        "counts": {str(verdict): comparison.count(verdict) for verdict in Verdict},
        "tensors": [_tensor_json(diff) for diff in comparison.tensors],
        "values": [
            {
                "name": value.name,
                "verdict": str(value.verdict),
                "a": None if value.verdict is Verdict.ONLY_B else shorten(value.a),
                "b": None if value.verdict is Verdict.ONLY_A else shorten(value.b),
            }
            for value in comparison.values
        ],
    }


def _tensor_json(diff: TensorDiff) -> dict[str, Any]:
    found = diff.difference
    sides = {
        key: None
        if side is None
        else {"dtype": _dtype(side), "shape": list(side.shape), "bytes": side.num_bytes, "alias_of": side.alias_of}
        for key, side in (("a", diff.a), ("b", diff.b))
    }
    return {
        "name": diff.name,
        "verdict": str(diff.verdict),
        **sides,
        "compared": None
        if found is None
        else {
            "num": found.num,
            "different": found.num_different,
            "same_bits": found.same_bits,
            "max_abs": found.max_abs,
            "max_rel": found.max_rel,
            "at": None if found.at is None else list(found.at),
        },
    }
