"""``show``: what a snapshot holds, from its manifest alone: tensors, plain values, ties, totals."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import textwrap
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import NotFoundError
from vescale_ckpt.state.tree import Foreign, TensorNode, ValueNode, describe, fqn, shorten, walk
from vescale_tools.common import ExitCode, add_url_argument, open_existing
from vescale_tools.output import Output, count, format_bytes, format_time, iso_time
from vescale_tools.sizes import tensor_bytes, totals
from vescale_tools.statistics import print_statistics, stats_json, tensor_statistics

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.snapshot import Snapshot
    from vescale_ckpt.state.tree import Node, Path
    from vescale_tools.sizes import Totals

_COLUMNS = ("name", "type", "shape", "size", "chunks", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    parser.add_argument("snapshot", metavar="RUN@STEP", help="or RUN@TAG, or RUN for its newest snapshot")
    parser.add_argument(
        "patterns",
        metavar="NAME",
        nargs="*",
        help="show only what has one of these dotted names, or is below it; may be globs, in which * matches dots too",
    )
    parser.add_argument("--flat", action="store_true", help="full dotted names instead of a tree")
    parser.add_argument(
        "--stats", action="store_true", help="read the tensors too: least, greatest, mean, deviation, zeros, NaNs"
    )


def run(args: argparse.Namespace) -> int:
    """Show the snapshot and return the exit code."""
    output = Output.of(args)
    with open_existing(args) as store:
        snapshot = store[args.snapshot]
        manifest = snapshot.manifest
        shown = [
            (path, node) for path, node in walk(manifest.tree) if _is_leaf(node) and _matches(fqn(path), args.patterns)
        ]
        if args.patterns and not shown:
            raise NotFoundError(
                f"cannot show {', '.join(map(repr, args.patterns))} of {snapshot.name}: nothing has such a name; "
                "without a NAME everything is shown",
                snapshot=snapshot.name,
            )
        tensors = [manifest.by_path[path] for path, node in shown if isinstance(node, TensorNode)]
        stats = tensor_statistics(snapshot, tensors, output) if args.stats else {}
    total = totals(manifest, tensors)
    if output.as_json:
        values = [_value_json(path, node) for path, node in shown if isinstance(node, ValueNode)]
        output.emit(
            {
                **_snapshot_json(snapshot),
                "tensors": [
                    _tensor_json(manifest, index) | ({"stats": stats_json(stats.get(index))} if args.stats else {})
                    for index in tensors
                ],
                "values": values,
                "totals": dataclasses.asdict(total),
            }
        )
        return ExitCode.OK
    rows = _flat_rows(manifest, shown) if args.flat else _tree_rows(manifest, shown)
    output.table(_COLUMNS, list(rows), right=("size", "chunks"))
    if args.stats:
        output.line()
        print_statistics(output, [(manifest.tensors[index].fqn, stats.get(index)) for index in tensors])
    output.line()
    for line in _summary(snapshot, total, num_values=len(shown) - len(tensors)):
        output.line(line)
    return ExitCode.OK


def _summary(snapshot: Snapshot, total: Totals, *, num_values: int) -> Iterator[str]:
    manifest = snapshot.manifest
    text = json.dumps(manifest.metadata, ensure_ascii=False)
    metadata = f", metadata {textwrap.shorten(text, 200, placeholder=' ...')}" if manifest.metadata else ""
    yield (
        f"{snapshot.name} version {snapshot.ref.version}, {format_time(manifest.created_seconds)} UTC, saved by "
        f"{count(manifest.world_size, 'rank')}{metadata}"
    )
    yield (
        f"{count(total.tensors, 'tensor')} ({total.aliases} tied), {count(num_values, 'plain value')}, "
        f"{format_bytes(total.bytes)}; {count(total.chunks, 'chunk')} in {count(total.packs, 'pack')}, "
        f"{format_bytes(total.stored_bytes)} stored"
    )


def _is_leaf(node: Node) -> bool:
    return isinstance(node, TensorNode | ValueNode)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(
        name == pattern
        or name.startswith(f"{pattern}.")
        or fnmatch.fnmatchcase(name, pattern)
        or fnmatch.fnmatchcase(name, f"{pattern}.*")
        for pattern in patterns
    )


def _flat_rows(manifest: Manifest, shown: Sequence[tuple[Path, Node]]) -> Iterator[list[str]]:
    for path, node in shown:
        yield [fqn(path), *_cells(manifest, path, node)]


def _tree_rows(manifest: Manifest, shown: Sequence[tuple[Path, Node]]) -> Iterator[list[str]]:
    """Yield the leaves below the containers that they are in."""
    containers = {path: node for path, node in walk(manifest.tree) if not _is_leaf(node)}
    open_path: Path = ()
    for path, node in shown:
        common = 0
        while common < min(len(open_path), len(path) - 1) and open_path[common] == path[common]:
            common += 1
        for depth in range(common, len(path) - 1):
            container = containers[path[: depth + 1]]
            yield [f"{'  ' * depth}{path[depth]}", describe(container).removeprefix("a "), "", "", "", ""]
        open_path = path[:-1]
        name = str(path[-1]) if path else "(the state itself)"
        yield [f"{'  ' * max(len(path) - 1, 0)}{name}", *_cells(manifest, path, node)]


def _cells(manifest: Manifest, path: Path, node: Node) -> list[str]:
    """Return what is said of a leaf beside its name."""
    if isinstance(node, ValueNode):
        return [_type_of(node.value), "", "", "", shorten(node.value)]
    index = manifest.by_path[path]
    record = manifest.tensors[index]
    kind = "" if record.kind == "tensor" else record.kind
    if record.alias_of is not None:
        note = f"= {manifest.tensors[record.alias_of].fqn}"
        return [record.dtype, str(record.shape), "", "", f"{kind} {note}".strip()]
    num_chunks = len(manifest.chunks.rows(index))
    return [record.dtype, str(record.shape), format_bytes(tensor_bytes(manifest, index)), str(num_chunks), kind]


def _type_of(value: Any) -> str:
    return value.kind if isinstance(value, Foreign) else type(value).__name__


def _snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    manifest = snapshot.manifest
    return {
        "snapshot": snapshot.name,
        "version": snapshot.ref.version,
        "created_seconds": manifest.created_seconds,
        "created": iso_time(manifest.created_seconds),
        "world_size": manifest.world_size,
        "writer": manifest.writer,
        "metadata": dict(manifest.metadata),
    }


def _tensor_json(manifest: Manifest, index: int) -> dict[str, Any]:
    record = manifest.tensors[index]
    rows = manifest.chunks.rows(index)
    return {
        "name": record.fqn,
        "path": list(record.path),
        "kind": record.kind,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "bytes": tensor_bytes(manifest, index),
        "chunks": len(rows),
        "stored_bytes": int(manifest.chunks.length[rows.start : rows.stop].sum()),
        "alias_of": None if record.alias_of is None else manifest.tensors[record.alias_of].fqn,
    }


def _value_json(path: Path, node: ValueNode) -> dict[str, Any]:
    value = node.value
    is_json = value is None or type(value) in {bool, int, float, str}
    text = {} if is_json else {"text": shorten(value)}
    return {
        "name": fqn(path),
        "path": list(path),
        "type": _type_of(value),
        "value": value if is_json else None,
        **text,
    }
