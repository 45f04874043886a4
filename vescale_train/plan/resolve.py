"""From regexes to names: every key must match, no name may be told two things."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vescale_train.plan.check import check
from vescale_train.plan.report import KeyReport, Problem, Report
from vescale_train.plan.write import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vescale_train.plan.data import Edge, Placements, Plan
    from vescale_train.plan.names import Names


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A plan with names in place of regexes."""

    parameters: Mapping[str, Placements]
    """Name of a parameter -> placements; without those that are replicated because no key names them. A tied
    parameter stands here under its first name alone."""
    edges: Mapping[str, Edge]
    """``<module>.input``, ``<module>.output`` or a parameter's name -> layouts in forward."""
    report: Report


def resolve(plan: Plan, names: Names, num_ranks: int | None = None) -> Resolved:
    """Return what the plan says of each name, with a report; raises nothing, ``report.raise_problems`` does.

    Args:
        plan: with regexes.
        names: what they may match.
        num_ranks: how many ranks the axis has; given, shapes and edges are checked too.
    """
    parameters = _Part("parameter", tuple(names.shapes))
    edges = _Part("forward", names.edges())
    layer: Plan | None = plan
    layers: list[Plan] = []
    while layer is not None:
        layers.append(layer)
        layer = layer.overrides
    for layer in reversed(layers):  # the innermost is the user's and settles its names first
        parameters.take(layer.parameter)
        edges.take(layer.forward)
    placed, tie_problems = _by_first_name(parameters.told, names)
    checked = () if num_ranks is None else check(placed, edges.told, names, num_ranks)
    report = Report(
        keys=(*parameters.keys, *edges.keys),
        replicated=tuple(name for name in names.shapes if names.tied[name] not in placed),
        problems=(*parameters.problems, *tie_problems, *edges.problems, *checked),
    )
    return Resolved(parameters=placed, edges=edges.told, report=report)


@dataclass(slots=True)
class _Part:
    """One part of a plan while its keys are matched, one layer after the other."""

    part: str
    candidates: tuple[str, ...]
    told: dict[str, Any] = field(default_factory=dict)
    keys: list[KeyReport] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def take(self, asked: Mapping[str, Any]) -> None:
        """Match a layer's keys against all names; names that an earlier layer settled stay as they are."""
        settled = frozenset(self.told)
        by: dict[str, str] = {}
        for key, value in asked.items():
            matched = self._match(key)
            if matched is None:
                continue
            self.keys.append(KeyReport(part=self.part, key=key, matched=matched, placed=shown(value)))
            free = [name for name in matched if name not in settled]
            if not matched:
                self._problem("unmatched", f"{self._said(key)} matches no name{self._nearest(key)}")
            elif free and all(name in by and self.told[name] == value for name in free):
                first = by[free[0]]
                self._problem(
                    "shadowed",
                    f"{self._said(key)} is never used: {self._said(first)} stands before it and says the same "
                    f"of {free[0]!r}; remove one of the two",
                )
            for name in free:
                self._tell(name, key, value, by)

    def _tell(self, name: str, key: str, value: Any, by: dict[str, str]) -> None:
        """Note what a key says of a name, unless another key said something else."""
        if name in by and self.told[name] != value:
            self._problem(
                "ambiguous",
                f"{name!r} is told two things: {self._said(by[name])} says {shown(self.told[name])}, "
                f"{self._said(key)} says {shown(value)}; make one regex narrower",
            )
            return
        if name not in by:
            by[name] = key
            self.told[name] = value

    def _match(self, key: str) -> tuple[str, ...] | None:
        """Return the names that a key matches whole, or None if it is no regex."""
        try:
            pattern = re.compile(key)
        except re.error as error:
            self._problem("regex", f"{self._said(key)} is no regular expression: {error}")
            return None
        return tuple(name for name in self.candidates if pattern.fullmatch(name))

    def _nearest(self, key: str) -> str:
        """Return a hint at the names that look most like the key."""
        plain = re.sub(r"\\d\+|\[0-9\]\+|\.\*|\[\^\.\]\+", "0", key).replace("\\.", ".").replace("\\", "")
        close = difflib.get_close_matches(plain, self.candidates, n=2, cutoff=0.5)
        partly = [name for name in self.candidates if key and _searched(key, name)][:2]
        if partly:
            return f"; a key must match the whole name, such as {' or '.join(map(repr, partly))}"
        return f"; nearest: {' or '.join(map(repr, close))}" if close else f"; there are {len(self.candidates)} names"

    def _said(self, key: str) -> str:
        return f"{self.part}[{key!r}]"

    def _problem(self, kind: str, text: str) -> None:
        self.problems.append(Problem(kind=kind, text=text))


def _searched(key: str, name: str) -> bool:
    return re.search(key, name) is not None


def _by_first_name(told: Mapping[str, Placements], names: Names) -> tuple[dict[str, Placements], list[Problem]]:
    """Return placements under first names; different ones for the names of one tied parameter are a problem."""
    placed: dict[str, Placements] = {}
    told_as: dict[str, str] = {}
    problems: list[Problem] = []
    for name, value in _in_order(told, names.shapes):
        first = names.tied[name]
        if first in placed and placed[first] != value:
            problems.append(
                Problem(
                    kind="tied",
                    text=f"{told_as[first]!r} and {name!r} are one tied parameter, but are placed as "
                    f"{shown(placed[first])} and as {shown(value)}; give both the same, or name one of them",
                )
            )
        placed.setdefault(first, value)
        told_as.setdefault(first, name)
    return placed, problems


def _in_order(told: Mapping[str, Placements], order: Iterable[str]) -> list[tuple[str, Placements]]:
    return [(name, told[name]) for name in order if name in told]
