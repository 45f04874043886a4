"""What became of every key of a plan, in a form that a person can act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReport:
    """One key of a plan, and the names it matched."""

    part: str
    """``parameter`` or ``forward``."""
    key: str
    matched: tuple[str, ...]
    placed: str
    """What it asks for, as a person writes it."""

    def __str__(self) -> str:
        return f"{self.part}[{self.key!r}] -> {self.placed}: {_listed(self.matched)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a plan."""

    kind: str
    """One of unmatched, shadowed, ambiguous, tied, regex, placement, shape, edge."""
    text: str
    """What was found, where, and what to do."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All keys of a plan against a model."""

    keys: tuple[KeyReport, ...]
    replicated: tuple[str, ...]
    """Parameters that no key names."""
    problems: tuple[Problem, ...]

    def kinds(self) -> frozenset[str]:
        """Return the kinds of problems that there are."""
        return frozenset(problem.kind for problem in self.problems)

    def __str__(self) -> str:
        lines = [str(key) for key in self.keys]
        lines.append(f"named by no key, so replicated: {_listed(self.replicated)}")
        lines += [str(problem) for problem in self.problems]
        return "\n".join(lines)

    def raise_problems(self, allow: Iterable[str] = ()) -> None:
        """Raise one error that lists every problem that is not of an allowed kind.

        Raises:
            PlanError: if there is one.
        """
        allowed = frozenset(allow)
        found = tuple(str(problem) for problem in self.problems if problem.kind not in allowed)
        if found:
            listed = "\n".join(f"  - {line}" for line in found)
            raise PlanError(
                f"the plan does not fit the model, {len(found)} problem{'s' if len(found) > 1 else ''}:\n{listed}",
                problems=found,
            )


def _listed(names: tuple[str, ...]) -> str:
    """Return the first names and how many more there are."""
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name or "(the model)" for name in names[:_SHOWN]) + more
