"""The page: what was gathered of a run as one HTML file that needs nothing else, no network and no script. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vescale_tools.output import count, format_bytes, format_time, percent
from vescale_tools.report.charts import Series, curves, stacked_bars
from vescale_tools.report.pictures import shard_map, tensor_treemap
from vescale_tools.report.svg import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_tools.report.gather import RunReport

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6670; --paper: #fff; --line: #d8dde3; --tint: #0072b222; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa4ae; --paper: #15181c; --line: #343a41; --tint: #56b4e933; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 2rem 1.5rem; max-width: 980px; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .2rem; }
p { margin: .2rem 0 .8rem; color: var(--soft); overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 1.2rem 0; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.small { font-size: 11px; fill: var(--soft); } svg text.light { font-size: 11px; fill: #fff; }
svg text.dark { font-size: 11px; fill: #111; }
svg .grid { stroke: var(--line); } svg .curve { stroke-width: 2; }
svg rect.tile { stroke: var(--paper); stroke-width: 1; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, td.left, th.left { text-align: left; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); margin: .6rem 0; }
"""


def render(report: RunReport, *, now: float) -> str:
    """Return the page; ``now`` is when it is made, in seconds since the epoch."""
    sections = [
        _head(report, now),
        _bytes(report),
        _tensors(report),
        _shards(report),
        _seconds(report),
        _loss(report),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{text_of(report.run)} - checkpoints</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            *[section for section in sections if section],
            "</body>",
            "</html>",
            "",
        ]
    )


def _head(report: RunReport, now: float) -> str:
    usage = report.usage
    facts = (
        ("snapshots", f"{len(usage.snapshots):,}"),
        ("newest", report.newest.rpartition("@")[2]),
        ("tensors, all snapshots", format_bytes(usage.tensor_bytes)),
        ("stored", format_bytes(usage.stored_bytes)),
        ("saved by sharing", percent(usage.saved_bytes, usage.tensor_bytes)),
        ("packs", f"{len(usage.packs):,}"),
    )
    cells = "".join(f"<div><dt>{text_of(name)}</dt><dd>{text_of(value)}</dd></div>" for name, value in facts)
    about = f"{report.url}, {format_time(now)} UTC; saved by {count(report.world_size, 'rank')}, {report.writer}"
    return f"<header><h1>{text_of(report.run)}</h1><p>{text_of(about)}</p><dl>{cells}</dl></header>"


def _section(identity: str, title: str, about: str, *parts: str) -> str:
    body = "\n".join(parts)
    return f'<section id="{identity}"><h2>{text_of(title)}</h2><p>{text_of(about)}</p>\n{body}\n</section>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text_of(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{text_of(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<details><summary>The numbers</summary><table><tr>{head}</tr>{body}</table></details>"


def _bytes(report: RunReport) -> str:
    snapshots = report.usage.snapshots
    new = [float(each.new_bytes) for each in snapshots]
    saved = [float(max(each.tensor_bytes - each.new_bytes, 0)) for each in snapshots]
    bars = stacked_bars(
        [str(each.step) for each in snapshots],
        [Series("stored for it", new), Series("shared with earlier snapshots, or compressed away", saved)],
        _bytes_text,
        "bytes over steps",
    )
    grown = curves(
        [float(number) for number in range(1, len(snapshots) + 1)],
        [
            Series("without sharing", _sums([float(each.tensor_bytes) for each in snapshots])),
            Series("stored", _sums(new)),
        ],
        _bytes_text,
        "bytes of all snapshots so far",
        fill=True,
    )
    rows = [
        [
            str(each.step) + (f" ({', '.join(report.tags[each.step])})" if each.step in report.tags else ""),
            format_time(each.created_seconds),
            *(format_bytes(size) for size in (each.tensor_bytes, each.stored_bytes, each.new_bytes, each.own_bytes)),
        ]
        for each in snapshots
    ]
    table = _table(("step", "created (UTC)", "tensors", "stored", "new", "own"), rows)
    return _section(
        "bytes",
        "Bytes over steps",
        "Each bar is a snapshot, in the order of commits. Below: the sum of all so far; what lies between the curves "
        "was saved.",
        bars,
        grown,
        table,
    )


def _tensors(report: RunReport) -> str:
    total = sum(each.tensor_bytes for each in report.tensors)
    largest = sorted(report.tensors, key=lambda each: -each.tensor_bytes)[:20]
    rows = [[each.name, format_bytes(each.tensor_bytes), percent(each.tensor_bytes, total)] for each in largest]
    about = (
        f"{report.newest}: {count(len(report.tensors), 'tensor')}, {format_bytes(total)}; areas are bytes in memory."
    )
    return _section(
        "tensors", "Tensors", about, tensor_treemap(report.tensors), _table(("tensor", "size", "part"), rows)
    )


def _shards(report: RunReport) -> str:
    forecast = report.forecast
    mapped = [(name, shape, forecast.held[name]) for name, shape in report.mapped]
    about = (
        f"{report.newest} loaded by {count(len(forecast.ranks), 'rank')} ({report.mesh}): storage is asked for "
        f"{format_bytes(forecast.read_bytes)}, each chunk once; ranks hand one another "
        f"{format_bytes(forecast.exchanged_bytes)}; the busiest reads {forecast.imbalance:.2f} times the mean. The "
        "largest tensor of each shape, with the ranks that hold its parts:"
    )
    bars = stacked_bars(
        [str(rank.rank) for rank in forecast.ranks],
        [
            Series("reads from storage", [float(rank.read_bytes) for rank in forecast.ranks]),
            Series("is handed by others", [float(rank.received_bytes) for rank in forecast.ranks]),
        ],
        _bytes_text,
        "bytes that each rank reads and is handed",
    )
    return _section("shards", "Shards", about, *([shard_map(mapped)] if mapped else []), bars)


def _seconds(report: RunReport) -> str:
    if not report.seconds:
        return ""
    phases = list(dict.fromkeys(phase for _, each in report.seconds for phase in each))
    chart = stacked_bars(
        [str(step) for step, _ in report.seconds],
        [Series(phase, [each.get(phase, 0.0) for _, each in report.seconds]) for phase in phases],
        lambda value: f"{value:.3g} s",
        "seconds by phase",
    )
    rows = [[str(step), *(f"{each.get(phase, 0.0):.3g}" for phase in phases)] for step, each in report.seconds]
    about = "As logged under 'seconds' in the state or the metadata of the snapshots."
    return _section("seconds", "Seconds by phase", about, chart, _table(("step", *phases), rows))


def _loss(report: RunReport) -> str:
    if not report.loss:
        return ""
    places = [place for place, _ in report.loss]
    values = [value for _, value in report.loss]
    chart = curves(places, [Series(report.loss_name, values)], lambda value: f"{value:.4g}", "loss")
    return _section("loss", "Loss", f"'{report.loss_name}', as logged in the snapshots.", chart)


def _bytes_text(value: float) -> str:
    return format_bytes(round(value))


def _sums(values: Sequence[float]) -> list[float]:
    sums, total = [], 0.0
    for value in values:
        total += value
        sums.append(total)
    return sums
