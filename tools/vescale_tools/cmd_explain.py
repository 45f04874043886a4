"""``explain``: which rank of a mesh would read what of a snapshot, before there is any such rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_ckpt.plan.forecast import forecast_load
from vescale_tools.common import ExitCode, add_snapshot_argument, add_url_argument, open_existing
from vescale_tools.meshes import parse_mesh, place, read_rules
from vescale_tools.output import Output, count, format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.plan.forecast import Forecast, RankForecast
    from vescale_tools.meshes import MeshText

_NUM_SHOWN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this command takes."""
    add_url_argument(parser)
    add_snapshot_argument(parser)
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        required=True,
        metavar="AXIS=N,...",
        help="the ranks, outermost axis first: dp=2,tp=4",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help='JSON from regular expressions over full names to placements by axis: {".*\\.wq": {"tp": "S(0)"}}; '
        "placements are R, S(dim) and only(position), what is not named replicates; default: dp and cp replicate, "
        "fsdp, tp and ep cut the first dim of tensors of two dims and more",
    )
    parser.add_argument("--tensor", action="append", default=[], metavar="NAME", help="show who holds which box of it")
    parser.add_argument("--all", action="store_true", help=f"every rank, not only the first {_NUM_SHOWN}")


def run(args: argparse.Namespace) -> int:
    """Explain and return the exit code."""
    output = Output.of(args)
    rules = None if args.plan is None else read_rules(args.plan)
    with open_existing(args) as store:
        snapshot = store[args.snapshot]
        manifest = snapshot.manifest
    names = [manifest.tensors[manifest.find(name)].fqn for name in args.tensor]
    forecast = forecast_load(manifest, args.mesh.shape, place(manifest, args.mesh, rules))
    _print(output, args.mesh, forecast, everything=args.all)
    for name in names:
        _print_tensor(output, name, forecast.held[name])
    output.emit(_as_json(snapshot.name, args.mesh, forecast, names))
    return ExitCode.OK


def _print(output: Output, mesh: MeshText, forecast: Forecast, *, everything: bool) -> None:
    shown = forecast.ranks if everything else forecast.ranks[:_NUM_SHOWN]
    titles = ("holds", "needs", "reads", "chunks", "is handed")
    rows = [
        [
            str(rank.rank),
            " ".join(f"{name} {at}" for name, at in zip(mesh.names, rank.coordinate, strict=True)),
            format_bytes(rank.held_bytes),
            format_bytes(rank.needed_bytes),
            format_bytes(rank.read_bytes),
            f"{rank.num_chunks:,}",
            format_bytes(rank.received_bytes),
        ]
        for rank in shown
    ]
    output.table(("rank", "at", *titles), rows, right=("rank", *titles))
    if len(shown) < len(forecast.ranks):
        output.line(f"and {len(forecast.ranks) - len(shown):,} more; --all shows them")
    output.line(
        f"{count(len(forecast.ranks), 'rank')} ({mesh}) need {format_bytes(forecast.stored_bytes)} and read "
        f"{format_bytes(forecast.read_bytes)}, each chunk once, and, where they share their reads, hand one another "
        f"{format_bytes(forecast.exchanged_bytes)}; the busiest reads {forecast.imbalance:.2f} times the mean"
    )


def _print_tensor(output: Output, name: str, held: Sequence[tuple[Box, ...]]) -> None:
    holders: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in enumerate(held):
        holders.setdefault(boxes, []).append(rank)
    rows = [[_boxes_text(boxes), ", ".join(map(str, ranks))] for boxes, ranks in holders.items()]
    output.line()
    output.table((name, "ranks"), rows)


def _boxes_text(boxes: Sequence[Box]) -> str:
    texts = [
        "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(box.offset, box.end, strict=True)) + "]"
        for box in boxes[:4]
    ]
    return " ".join(texts) + (f" and {len(boxes) - 4} more" if len(boxes) > 4 else "") if boxes else "nothing"


def _as_json(name: str, mesh: MeshText, forecast: Forecast, tensors: Sequence[str]) -> dict[str, Any]:
    return {
        "snapshot": name,
        "mesh": dict(zip(mesh.names, mesh.shape, strict=True)),
        "stored_bytes": forecast.stored_bytes,
        "read_bytes": forecast.read_bytes,
        "exchanged_bytes": forecast.exchanged_bytes,
        "imbalance": forecast.imbalance,
        "ranks": [_rank_json(rank) for rank in forecast.ranks],
        "tensors": {
            tensor: [
                [{"offset": list(box.offset), "shape": list(box.shape)} for box in boxes]
                for boxes in forecast.held[tensor]
            ]
            for tensor in tensors
        },
    }


def _rank_json(rank: RankForecast) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "coordinate": list(rank.coordinate),
        "held_bytes": rank.held_bytes,
        "needed_bytes": rank.needed_bytes,
        "read_bytes": rank.read_bytes,
        "received_bytes": rank.received_bytes,
        "chunks": rank.num_chunks,
    }
