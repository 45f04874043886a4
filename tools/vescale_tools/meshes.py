"""Meshes and plans as people write them: ``dp=2,tp=4``, and a JSON file of placements by name."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.placement import Boxes, Placement, Replicate, Shard
from vescale_tools.common import UsageError

if TYPE_CHECKING:
    from vescale_ckpt.format.records import Manifest

_AXIS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([1-9][0-9]{0,6})")
_PLACEMENT: Final = re.compile(r"(R|Replicate)(?:\(\))?|(?:S|Shard)\((-?\d+)\)|only\((\d+)\)")
REPLICATING: Final = ("dp", "cp")
"""Axes along which, without a plan, every rank holds all of a tensor."""
_SHARDING: Final = ("fsdp", "tp", "ep")
"""Axes along which, without a plan, a tensor is cut along its first dim."""


@dataclass(frozen=True, slots=True)
class MeshText:
    """A mesh with named axes, outermost first."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in zip(self.names, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Rule:
    """What a plan says of the tensors whose full names match."""

    pattern: re.Pattern[str]
    by_axis: dict[str, str]


def parse_mesh(text: str) -> MeshText:
    """Return the mesh of ``dp=2,tp=4``; an argparse ``type``.

    Raises:
        argparse.ArgumentTypeError: it is none, or names an axis twice.
    """
    matches = [_AXIS.fullmatch(part.strip()) for part in text.split(",")]
    found = [(match[1], int(match[2])) for match in matches if match is not None]
    names = tuple(name for name, _ in found)
    if len(found) != len(matches) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write dp=2,tp=4, outermost axis first, each axis once")
    return MeshText(names, tuple(size for _, size in found))


def read_rules(path: str) -> list[Rule]:
    """Return the rules of a plan file: one JSON object from a regular expression to an object from axis to placement.

    Raises:
        UsageError: it cannot be read or understood.
    """
    try:
        plan = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot use the plan {path}: {error}") from error
    if not isinstance(plan, dict):
        raise UsageError(f"cannot use the plan {path}: it is no JSON object from patterns to placements")
    return [_rule(path, pattern, by_axis) for pattern, by_axis in plan.items()]


def _rule(path: str, pattern: str, by_axis: Any) -> Rule:
    where = f"cannot use the plan {path}: {pattern!r}"
    if not isinstance(by_axis, dict) or not all(isinstance(text, str) for text in by_axis.values()):
        raise UsageError(f'{where} has no object from axes to placements, such as {{"tp": "S(0)"}}')
    for axis, text in by_axis.items():
        if not _PLACEMENT.fullmatch(text):
            raise UsageError(f"{where} places {axis} as {text!r}; known are R, S(dim) and only(position)")
    try:
        return Rule(re.compile(pattern), by_axis)
    except re.error as error:
        raise UsageError(f"{where} is no regular expression: {error}") from error


def place(manifest: Manifest, mesh: MeshText, rules: list[Rule] | None) -> dict[int, list[Placement]]:
    """Return the placements of every tensor, one for each axis.

    With rules, the first that matches a tensor's whole name holds, and axes or tensors that none names replicate.
    Without, ``dp`` and ``cp`` replicate, and ``fsdp``, ``tp`` and ``ep`` cut the first dim of tensors of two and more.

    Raises:
        UsageError: a rule names an axis that the mesh has not, matches nothing, or there is no rule for an axis.
    """
    if rules is None:
        _refuse_unknown(mesh)
        by_axis = dict.fromkeys(_SHARDING, "S(0)")
        return {
            i: [
                _placement(by_axis.get(name, "R") if len(record.shape) > 1 else "R", record.shape, size)
                for name, size in zip(mesh.names, mesh.shape, strict=True)
            ]
            for i, record in enumerate(manifest.tensors)
        }
    for rule in rules:
        unknown = sorted(rule.by_axis.keys() - set(mesh.names))
        if unknown:
            raise UsageError(f"cannot use the plan: {rule.pattern.pattern!r} names {unknown}, the mesh has {mesh}")
    used: set[int] = set()
    placements: dict[int, list[Placement]] = {}
    for i, record in enumerate(manifest.tensors):
        number = next((n for n, rule in enumerate(rules) if rule.pattern.fullmatch(record.fqn)), None)
        chosen = {} if number is None else rules[number].by_axis
        used |= set() if number is None else {number}
        placements[i] = [
            _placement(chosen.get(name, "R"), record.shape, size)
            for name, size in zip(mesh.names, mesh.shape, strict=True)
        ]
    unused = [rule.pattern.pattern for n, rule in enumerate(rules) if n not in used]
    if unused:
        raise UsageError(f"cannot use the plan: no tensor is left for {', '.join(map(repr, unused[:5]))}")
    return placements


def _refuse_unknown(mesh: MeshText) -> None:
    unknown = [name for name in mesh.names if name not in (*REPLICATING, *_SHARDING)]
    if unknown:
        raise UsageError(
            f"cannot guess what the axes {', '.join(unknown)} do to tensors: known without a plan are "
            f"{', '.join((*REPLICATING, *_SHARDING))}; pass --plan FILE"
        )


def _placement(text: str, shape: tuple[int, ...], size: int) -> Placement:
    match = _PLACEMENT.fullmatch(text)
    if match is None or match[1] is not None:
        return Replicate()
    if match[2] is not None:
        return Shard(int(match[2]))
    nothing = Box((0,) * len(shape), (0,) * len(shape))
    at = int(match[3])
    if not shape or at >= size:
        raise UsageError(
            f"cannot place a tensor of shape {shape} as {text} on an axis of {size}: there is no such place"
        )
    return Boxes(tuple(Box.whole(shape) if position == at else nothing for position in range(size)))
