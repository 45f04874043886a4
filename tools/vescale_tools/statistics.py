"""Statistics of a snapshot's tensors, read block by block, for ``show --stats``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vescale_ckpt.compare.statistics import Statistics, statistics_of
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.dtypes import item_bytes
from vescale_tools.sizes import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_ckpt.snapshot import Snapshot
    from vescale_tools.output import Output


def tensor_statistics(snapshot: Snapshot, tensors: Sequence[int], output: Output) -> dict[int, Statistics | None]:
    """Return the statistics of tensors, given by index; None of one whose values torch cannot convert."""
    manifest = snapshot.manifest
    found: dict[int, Statistics | None] = {}
    owners = {index: manifest.resolve(index) for index in tensors}
    with output.progress(
        snapshot.name, sum(tensor_bytes(manifest, index) for index in set(owners.values()))
    ) as advance:
        for owner in sorted(set(owners.values())):
            record = manifest.tensors[owner]
            read = functools.partial(snapshot.read, record.path)
            try:
                found[owner] = statistics_of(read, record.shape, item_bytes(record.dtype))
            except InvalidInputError:
                found[owner] = None
            advance(tensor_bytes(manifest, owner))
    return {index: found[owner] for index, owner in owners.items()}


def print_statistics(output: Output, rows: Sequence[tuple[str, Statistics | None]]) -> None:
    """Print a table of statistics by name."""
    titles = ("min", "max", "mean", "std", "zeros", "NaN", "inf")
    output.table(("name", *titles), [[name, *_cells(stats)] for name, stats in rows], right=titles)


def _cells(stats: Statistics | None) -> list[str]:
    if stats is None:
        return ["?"] * 7
    numbers = [stats.minimum, stats.maximum, stats.mean, stats.std] if stats.num_finite else []
    counts = [f"{n:,}" for n in (stats.num_zero, stats.num_nan, stats.num_infinite)]
    return [*(f"{number:.4g}" for number in numbers), *[""] * (4 - len(numbers)), *counts]


def stats_json(stats: Statistics | None) -> dict[str, Any] | None:
    """Return statistics for ``--json``."""
    if stats is None:
        return None
    some = bool(stats.num_finite)
    return {
        "count": stats.num,
        "min": stats.minimum if some else None,
        "max": stats.maximum if some else None,
        "mean": stats.mean if some else None,
        "std": stats.std if some else None,
        "zeros": stats.num_zero,
        "nan": stats.num_nan,
        "inf": stats.num_infinite,
    }
