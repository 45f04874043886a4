"""A plan as data: which parameter is cut how, and how values are laid out at the edges of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from vescale_train.errors import PlanError
from vescale_train.plan.placement import encode

Placements = tuple[Placement, ...]
"""One placement for each axis that a plan speaks of: the tensor parallel one."""

Edge = tuple[Placements | None, ...] | Mapping[str, Placements]
"""Placements of positional values, ``None`` for one that is left alone, or of keyword arguments by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a model is cut over the tensor parallel axis. Immutable; takes and holds plain data.

    Keys are regular expressions that must match a whole name. The first part of the key is the fully qualified name
    of a parameter or a module.
    """

    parameter: Mapping[str, Placements] = field(default_factory=dict)
    """Regex of a parameter's name -> placements, as ``{r"layers\\.\\d+\\.up\\.weight": [Shard(0)]}``. What no key names
    is replicated."""
    forward: Mapping[str, Edge | Placements] = field(default_factory=dict)
    """Regex of ``<module>.input``, ``<module>.output`` or ``<parameter>`` -> placements in forward. A list such as
    ``[[Shard(1)], None]``
    is for the first and second positional value, ``{"mask": [Replicate()]}`` for keyword arguments."""
    why: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Key -> the reason for it, for people; no part of the plan's identity."""

    overrides: Plan | None = None
    """A plan that wins wherever it names something; a user's, over one that was proposed."""

    def __post_init__(self) -> None:
        """Take lists for tuples, and let nobody change what was taken."""
        for part in ("parameter", "forward", "why"):
            given = getattr(self, part)
            if not isinstance(given, Mapping) or any(not isinstance(key, str) for key in given):
                raise PlanError(f"cannot read {part!r} of a plan: want a dict with regexes as keys, got {given!r}")
        parameter = {key: _placements(key, value) for key, value in self.parameter.items()}
        forward = {key: _edge(key, value) for key, value in self.forward.items()}
        object.__setattr__(self, "parameter", MappingProxyType(parameter))
        object.__setattr__(self, "forward", MappingProxyType(forward))
        object.__setattr__(self, "why", MappingProxyType(dict(self.why)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """What cannot change need not be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross process borders as plain dicts."""
        forward = {key: dict(edge) if isinstance(edge, Mapping) else edge for key, edge in self.forward.items()}
        return _rebuilt, (dict(self.parameter), forward, dict(self.why), self.overrides)

    @classmethod
    def of(cls, given: Plan | Mapping[str, Any]) -> Plan:
        """Return a plan made of ``{"parameter": {...}, "forward": {...}}``, or the plan itself.

        Raises:
            PlanError: if it has other parts, or placements of another form.
        """
        if isinstance(given, Plan):
            return given
        if not isinstance(given, Mapping):
            raise PlanError(f"cannot make a plan of {type(given).__name__}: want a Plan or a dict with its parts")
        unknown = sorted(map(str, set(given) - {"parameter", "forward", "why", "overrides"}))
        if unknown:
            raise PlanError(f"cannot make a plan with parts {unknown}: its parts are 'parameter' and 'forward'")
        over = given.get("overrides")
        parts = {part: given[part] or {} for part in given if part != "overrides"}
        return cls(**parts, overrides=None if over is None else cls.of(over))

    def overridden(self, other: Plan | Mapping[str, Any] | None) -> Plan:
        """Return this plan with another laid over it: what the other names is as the other says."""
        if other is None:
            return self
        over = Plan.of(other)
        return replace(self, overrides=over if self.overrides is None else self.overrides.overridden(over))


def _rebuilt(parameter: Any, forward: Any, why: Any, overrides: Plan | None) -> Plan:
    return Plan(parameter=parameter, forward=forward, why=why, overrides=overrides)


def _placements(key: str, value: Any) -> Placements:
    """Return a list of placements as a tuple of those that plans know."""
    if isinstance(value, Placement):
        value = (value,)
    if not isinstance(value, Sequence) or not value or not all(isinstance(one, Placement) for one in value):
        raise PlanError(f"cannot read the placements of {key!r}: want a list such as [Shard(0)], got {value!r}")
    for one in value:
        encode(one)
    return tuple(value)


def _edge(key: str, value: Any) -> Edge:
    """Return the layouts of the values at an edge, for positions or for names."""
    if isinstance(value, Mapping):
        return MappingProxyType({str(name): _placements(key, one) for name, one in value.items()})
    if isinstance(value, Placement) or (isinstance(value, Sequence) and value and isinstance(value[0], Placement)):
        return (_placements(key, value),)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PlanError(
            f"cannot read the edge {key!r}: want [[Replicate()], None, ...] by position or {{'name': [Replicate()]}}, "
            f"got {value!r}"
        )
    return tuple(None if one is None else _placements(key, one) for one in value)
