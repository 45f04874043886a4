"""A plan as JSON, as a hash of what it says, and as a person writes its placements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import blake3
from torch.distributed.tensor.placement_types import Placement

from vescale_train.errors import PlanError
from vescale_train.plan.data import Plan
from vescale_train.plan.placement import Replicate, decode, encode, is_interleaved, parts_of

VERSION = 1


def to_json(plan: Plan) -> str:
    """Return the plan as JSON, with keys in their order; ``from_json`` gives an equal plan."""
    return json.dumps({"version": VERSION, **_record(plan)}, indent=1)


def from_json(text: str) -> Plan:
    """Return the plan that ``to_json`` wrote.

    Raises:
        PlanError: if the text is no plan, or one of another version.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"cannot read a plan: not JSON, {error}") from error
    if not isinstance(record, dict) or record.pop("version", None) != VERSION:
        raise PlanError(f"cannot read a plan: want an object with version {VERSION}")
    return _plan(record)


def content_hash(plan: Plan) -> str:
    """Return 32 hex digits that are equal for plans that say the same, whatever the reasons given in ``why``."""
    record = _record(plan)
    text = json.dumps(_without_reasons(record), separators=(",", ":"))
    return blake3.blake3(text.encode()).hexdigest(length=16)


def shown(value: Any) -> str:
    """Return placements, or those of an edge, as a person writes them in a plan."""
    if value is None:
        return "None"
    if isinstance(value, Placement):
        if is_interleaved(value):
            return f"Interleaved({value.dim}, {parts_of(value)})"  # type: ignore[attr-defined]
        return "Replicate()" if isinstance(value, Replicate) else f"Shard({value.dim})"  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {shown(one)}" for name, one in value.items()) + "}"
    return "[" + ", ".join(shown(one) for one in value) + "]"


def _record(plan: Plan) -> dict[str, Any]:
    return {
        "parameter": {key: [encode(one) for one in value] for key, value in plan.parameter.items()},
        "forward": {key: _edge_record(value) for key, value in plan.forward.items()},
        "why": dict(plan.why),
        "overrides": None if plan.overrides is None else _record(plan.overrides),
    }


def _edge_record(edge: Any) -> Any:
    if isinstance(edge, Mapping):
        return {name: [encode(one) for one in value] for name, value in edge.items()}
    return [None if value is None else [encode(one) for one in value] for value in edge]


def _without_reasons(record: dict[str, Any]) -> dict[str, Any]:
    over = record["overrides"]
    return {**record, "why": None, "overrides": None if over is None else _without_reasons(over)}


def _plan(record: Any) -> Plan:
    """Return the plan of a record, checked part by part."""
    match record:
        case {"parameter": dict(parameter), "forward": dict(forward), "why": dict(why), "overrides": over, **rest}:
            if not rest and all(isinstance(reason, str) for reason in why.values()):
                return Plan(
                    parameter={key: tuple(_decoded(value)) for key, value in parameter.items()},
                    forward={key: _edge(value) for key, value in forward.items()},
                    why=why,
                    overrides=None if over is None else _plan(over),
                )
        case _:
            pass
    raise PlanError("cannot read a plan: its record wants exactly parameter, forward, why and overrides")


def _decoded(value: Any) -> list[Placement]:
    if not isinstance(value, list):
        raise PlanError(f"cannot read placements from {value!r}: want a list")
    return [decode(one) for one in value]


def _edge(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _decoded(one) for name, one in value.items()}
    if not isinstance(value, list):
        raise PlanError(f"cannot read an edge from {value!r}: want a list or an object")
    return [None if one is None else _decoded(one) for one in value]
