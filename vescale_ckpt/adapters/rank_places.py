"""Places of ranks: where each stood that saved a value of its own, and which of the values another rank goes on with.

A rank's entry in the tree is its value, or, if it said where it was, a dict of its coordinate and its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.device_mesh import DeviceMesh

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.state.per_rank import RankPlace
from vescale_ckpt.state.tree import DictNode, ListNode, Node, Path, PerRankNode, TupleNode, ValueNode, fqn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_ckpt.state.per_rank import PerRank

COORDINATE_KEY: Final = "__mesh_coordinate__"
"""In the dict that stands for a rank's value and its place: a dict of axis -> (position, size)."""
VALUE_KEY: Final = "value"
"""In the same dict: the value."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank saved."""

    place: RankPlace
    path: Path
    """Of its value."""
    node: Node


def axes_of(value: PerRank[Any], what: str) -> dict[str, tuple[int, int]]:
    """Return axis -> (this rank's position, size) of the mesh that a per-rank value was given; empty without one.

    Raises:
        InvalidInputError: this rank is not in the mesh, or what was given is none.
    """
    mesh = value.mesh
    if isinstance(mesh, DeviceMesh):
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise InvalidInputError(f"cannot place '{what}': this rank is not in the mesh given to PerRank", fqn=what)
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        return dict(zip(names, zip(coordinate, mesh.shape, strict=True), strict=True))
    axes = dict(mesh or {})
    if not all(type(name) is str and _is_position(at) for name, at in axes.items()):
        raise InvalidInputError(
            f"cannot place '{what}': mesh={mesh!r} is no DeviceMesh, nor does it map axes to (position, size)",
            fqn=what,
        )
    return axes


def entry_node(axes: Mapping[str, tuple[int, int]], value: Node) -> Node:
    """Return what is stored of one rank: its value, and where it is if it said so."""
    if not axes:
        return value
    places = tuple((name, TupleNode(tuple(ValueNode(int(n)) for n in at))) for name, at in axes.items())
    return DictNode(((COORDINATE_KEY, DictNode(places)), (VALUE_KEY, value)))


def entries_of(node: PerRankNode, stored: Path, saved_world_size: int | None = None) -> tuple[Entry, ...]:
    """Return what all ranks saved, by coordinate and then by rank.

    ``saved_world_size`` is the number of ranks that saved; unknown, it is taken to be the number of entries.

    Raises:
        FormatError: a coordinate is none.
    """
    world_size = len(node.items) if saved_world_size is None else saved_world_size
    found = []
    for rank, child in node.items:
        axes, value, path = _opened(child, (*stored, rank))
        place = RankPlace(
            rank=rank,
            world_size=world_size,
            mesh={name: size for name, (_, size) in axes.items()},
            coordinate={name: position for name, (position, _) in axes.items()},
        )
        found.append(Entry(place, path, value))
    return tuple(sorted(found, key=lambda entry: (tuple(entry.place.coordinate.values()), entry.place.rank)))


def own_entry(entries: tuple[Entry, ...], here: RankPlace) -> Entry | None:
    """Return the entry that this rank goes on with; None where the values are of another world."""
    if any(entry.place.world_size != here.world_size for entry in entries):
        return None
    by_rank = [entry for entry in entries if entry.place.rank == here.rank]
    if not here.mesh or not all(entry.place.mesh for entry in entries):
        return by_rank[0] if by_rank else None
    if any(entry.place.mesh != here.mesh for entry in entries):
        return None
    alike = [entry for entry in entries if entry.place.coordinate == here.coordinate]
    if by_rank and by_rank[0] in alike:
        return by_rank[0]
    return alike[0] if len(alike) == 1 else None


def _opened(node: Node, path: Path) -> tuple[dict[str, tuple[int, int]], Node, Path]:
    """Return (axes, value, its path) of what one rank saved."""
    items = dict(node.items) if isinstance(node, DictNode) else {}
    if items.keys() != {COORDINATE_KEY, VALUE_KEY}:
        return {}, node, path
    places = items[COORDINATE_KEY]
    axes = {}
    for name, at in places.items if isinstance(places, DictNode) else (("", places),):
        numbers = (
            tuple(n.value for n in at.items if isinstance(n, ValueNode)) if isinstance(at, TupleNode | ListNode) else ()
        )
        if not isinstance(name, str) or not _is_position(numbers):
            raise FormatError(f"cannot read the place of a rank at '{fqn(path)}': it is no axis -> (position, size)")
        axes[name] = (numbers[0], numbers[1])
    return axes, items[VALUE_KEY], (*path, VALUE_KEY)


def _is_position(at: Any) -> bool:
    return isinstance(at, tuple) and len(at) == 2 and all(type(n) is int for n in at) and 0 <= at[0] < at[1]
