"""Results: what a run found, as records that go to JSON and come back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Sample, median

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.case import Case, Question, Ratio

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some measurements and how far they reach."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """All turns of one side."""

    samples: tuple[Sample, ...]
    first: Sample | None = None
    """The turn before those, with nothing warm."""

    def spread(self, quantity: str) -> Spread | None:
        """Return the spread of a quantity over the turns; None where they do not have it.

        ``first.NAME`` is that quantity of the turn before those.
        """
        name = quantity.removeprefix("first.")
        samples = self.samples if name == quantity else tuple(filter(None, (self.first,)))
        if not samples or not all(sample.has(name) for sample in samples):
            return None
        return Spread.of([sample.quantity(name) for sample in samples])


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioResult:
    """What a ratio came to."""

    name: str
    value: float
    at_most: float | None
    exact: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        return None if self.at_most is None else self.value <= self.at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What one case came to."""

    question: str
    case: str
    storage: str
    parameters: dict[str, Any] = field(default_factory=dict)
    sides: dict[str, SideResult] = field(default_factory=dict)
    ratios: tuple[RatioResult, ...] = ()
    sweep: tuple[str, int] | None = None
    curve: str = ""
    notes: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    """Why there is no result."""
    load_average: float = 0.0
    """When the case ended."""

    @property
    def key(self) -> str:
        """``question/case``."""
        return f"{self.question}/{self.case}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaseResult:
        """Return the result of ``to_json``."""
        fields = dict(data)
        fields["sides"] = {
            name: SideResult(
                samples=tuple(Sample.from_json(sample) for sample in side["samples"]),
                first=None if side["first"] is None else Sample.from_json(side["first"]),
            )
            for name, side in data["sides"].items()
        }
        fields["ratios"] = tuple(RatioResult(**ratio) for ratio in data["ratios"])
        fields["notes"] = tuple(data["notes"])
        fields["sweep"] = None if data["sweep"] is None else (data["sweep"][0], data["sweep"][1])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All results of one run."""

    scale: str
    environment: dict[str, Any]
    results: tuple[CaseResult, ...]

    def save(self, path: Path) -> None:
        """Write the run as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": SCHEMA,
            "scale": self.scale,
            "environment": self.environment,
            "results": [result.to_json() for result in self.results],
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def open(cls, path: Path) -> Run:
        """Return a run that was saved.

        Raises:
            ValueError: it is of another schema.
        """
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("schema") != SCHEMA:
            raise ValueError(f"{path} has the schema {document.get('schema')}, expected {SCHEMA}")
        results = tuple(CaseResult.from_json(result) for result in document["results"])
        return cls(scale=document["scale"], environment=document["environment"], results=results)

    def of(self, question: str) -> list[CaseResult]:
        """Return the results of one question."""
        return [result for result in self.results if result.question == question]


def conclude(question: Question, case: Case, bench: Bench) -> CaseResult:
    """Return what the samples of a case come to."""
    names = [*(name for name in bench.order if name in bench.samples), *bench.samples]
    sides = {
        name: SideResult(samples=tuple(bench.samples[name]), first=bench.first.get(name))
        for name in dict.fromkeys(names)
    }
    found = [ratio_of(ratio, sides) for ratio in case.ratios]
    for ratio, result in zip(case.ratios, found, strict=True):
        if result is None:
            bench.note(f"no value for '{ratio.name}': {ratio.of} or {ratio.to} was not measured")
    return CaseResult(
        question=question.name,
        case=case.name,
        storage=case.storage,
        parameters=case.parameters(),
        sides=sides,
        ratios=tuple(result for result in found if result is not None),
        sweep=case.sweep,
        curve=case.curve,
        notes=tuple(bench.notes),
        missing=dict(bench.missing),
    )


def ratio_of(ratio: Ratio, sides: Mapping[str, SideResult]) -> RatioResult | None:
    """Return what a ratio comes to, of medians; None where a quantity is missing or the lower one is not positive."""
    values = []
    for side, quantity in (ratio.of, ratio.to):
        found = sides[side].spread(quantity) if side in sides else None
        if found is None:
            return None
        values.append(found.median)
    if values[1] <= 0:
        return None
    return RatioResult(name=ratio.name, value=values[0] / values[1], at_most=ratio.at_most, exact=ratio.exact)
