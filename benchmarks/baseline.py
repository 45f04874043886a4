"""The stored baseline: ratios of an earlier run, to tell whether this one is worse. Seconds are never compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.results import RatioResult, Run

BASELINE_PATH = Path(__file__).parent / "results" / "baseline.json"
TIMED_TOLERANCE = 1.3
"""How much larger a ratio of times may be: what is measured by turns on a busy machine still differs so much."""
EXACT_TOLERANCE = 1.005
"""The same for ratios of counted bytes and requests."""


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio now and in the baseline."""

    key: str
    before: float
    now: float
    worse: bool


def compare(run: Run, path: Path = BASELINE_PATH) -> list[Change]:
    """Return how the ratios of a run differ from the baseline of its scale, worst first; what is new is left out."""
    if not path.exists():
        return []
    known = json.loads(path.read_text(encoding="utf-8")).get(run.scale, {}).get("ratios", {})
    changes = []
    for key, ratio in _ratios(run):
        before = known.get(key)
        if before is None:
            continue
        tolerance = EXACT_TOLERANCE if ratio.exact else TIMED_TOLERANCE
        changes.append(Change(key, before, ratio.value, worse=ratio.value > before * tolerance))
    return sorted(changes, key=lambda change: -(change.now / change.before if change.before else 1))


def store(run: Run, path: Path = BASELINE_PATH) -> None:
    """Make a run the baseline of its scale; of questions that it did not ask, the old ratios stay."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entry = document.setdefault(run.scale, {})
    environment = run.environment
    entry["made"] = {name: environment[name] for name in ("revision", "dirty", "when", "host", "versions")}
    entry.setdefault("ratios", {}).update({key: round(ratio.value, 4) for key, ratio in _ratios(run)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _ratios(run: Run) -> list[tuple[str, RatioResult]]:
    return [(f"{result.key}/{ratio.name}", ratio) for result in run.results for ratio in result.ratios]
