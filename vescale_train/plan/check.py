"""What can be known to be wrong before any step: placements that do not fit shapes, edges that do not fit forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vescale_train.plan.placement import Replicate, parts_of
from vescale_train.plan.report import Problem
from vescale_train.plan.write import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_train.plan.data import Edge, Placements
    from vescale_train.plan.names import Names


def check(
    parameters: Mapping[str, Placements], edges: Mapping[str, Edge], names: Names, num_ranks: int
) -> tuple[Problem, ...]:
    """Return what does not fit, for one axis of ``num_ranks`` ranks; everything, and not the first alone."""
    found: list[Problem] = []
    for name, placements in parameters.items():
        found += _fits(name, placements, names.shapes[name], num_ranks)
    for name, edge in edges.items():
        found += _edge_fits(name, edge, names, num_ranks)
    return tuple(found)


def _fits(name: str, placements: Placements, shape: tuple[int, ...], num_ranks: int) -> Iterator[Problem]:
    """Yield why a parameter cannot be cut so."""
    if len(placements) != 1:
        yield _one_axis(name, placements)
        return
    (placement,) = placements
    if isinstance(placement, Replicate):
        return
    dim: int = placement.dim  # type: ignore[attr-defined]
    where = f"{name!r} of shape {shape} cannot be {shown(placement)}"
    if not -len(shape) <= dim < len(shape):
        yield Problem(kind="shape", text=f"{where}: it has {len(shape)} dims; choose one of 0 to {len(shape) - 1}")
        return
    length, parts = shape[dim], parts_of(placement)
    if length % parts:
        yield Problem(kind="shape", text=f"{where}: {length} is not {parts} equal parts")
    elif length // parts < num_ranks:
        what = f"each of {parts} parts has {length // parts}" if parts > 1 else f"it has {length}"
        yield Problem(
            kind="shape",
            text=f"{where}: {what} along that dim for {num_ranks} ranks, and some would hold nothing; "
            "cut another dim, or leave it whole",
        )


def _edge_fits(name: str, edge: Edge, names: Names, num_ranks: int) -> Iterator[Problem]:
    """Yield why values cannot be laid out so at an edge."""
    by_name = isinstance(edge, Mapping)
    entries = list(edge.values()) if isinstance(edge, Mapping) else [one for one in edge if one is not None]
    for placements in entries:
        if len(placements) != 1:
            yield _one_axis(name, placements)
    if name in names.shapes:
        if by_name or len(edge) != 1:
            yield Problem(kind="edge", text=f"{name!r} is one tensor, but {shown(edge)} speaks of several values")
        elif entries:
            yield from _fits(name, entries[0], names.shapes[name], num_ranks)
        return
    module, _, what = name.rpartition(".")
    takes = names.takes.get(module)
    if what == "input" and takes is not None:
        yield from _taken(name, edge, takes)


def _taken(name: str, edge: Any, takes: tuple[str, ...]) -> Iterator[Problem]:
    """Yield what an edge names that a forward does not take."""
    listed = ", ".join(takes) or "nothing"
    if isinstance(edge, Mapping):
        for argument in edge:
            if argument not in takes:
                yield Problem(kind="edge", text=f"{name!r} names {argument!r}, but that forward takes {listed}")
    elif len(edge) > len(takes):
        yield Problem(kind="edge", text=f"{name!r} lays out {len(edge)} values, but that forward takes {listed}")


def _one_axis(name: str, placements: Placements) -> Problem:
    text = (
        f"{name!r} is placed as {shown(placements)}, over {len(placements)} axes; a plan speaks of one alone: "
        "write one placement"
    )
    return Problem(kind="placement", text=text)
