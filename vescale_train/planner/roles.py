"""What each layer is for: told by its family, else by its name, else by its shape beside its siblings."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from vescale_train.planner.families import Family

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vescale_train.planner.layers import Layer

GENERIC = Family(
    columns=("q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv", "to_q", "to_k", "to_v",
             "gate_proj", "up_proj", "fc1", "c_fc", "w1", "w3"),
    rows=("o_proj", "out_proj", "wo", "to_out", "output", "down_proj", "fc2", "w2", "c_proj"),
    keys=("k_proj", "v_proj", "key", "value", "wk", "wv", "to_k", "to_v"),
    attention=("q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv", "to_q", "to_k", "to_v",
               "o_proj", "out_proj", "wo", "to_out"),
)  # fmt: skip
"""Names that many models share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """How a layer takes part."""

    layer: Layer
    cut: str
    """``columns``, ``rows`` or ``vocabulary``."""
    parts: int = 1
    """How many equal things lie side by side in the outputs."""
    attention: bool = False
    """Whether the cut is one between heads."""
    keys: bool = False
    """Whether the heads are those of keys or values."""
    why: str


def roles_of(layers: Sequence[Layer], family: Family | None) -> tuple[Role, ...]:
    """Return the roles of the layers that have one.

    Of a family that is known every layer's name says it. Otherwise siblings are looked at together, and have roles only
    if some make parts and some take them.
    """
    linear = [layer for layer in layers if layer.kind == "linear"]
    if family is not None:
        return tuple(_told(linear, family, "its family"))
    found: list[Role] = []
    by_parent = sorted(linear, key=lambda layer: layer.parent)
    for _, siblings in groupby(by_parent, lambda layer: layer.parent):
        block = tuple(siblings)
        ways = (_told(block, GENERIC, "its name"), _by_shape(block))
        found += next((roles for roles in ways if {role.cut for role in roles} == {"columns", "rows"}), [])
    return tuple(found)


def named(layer: Layer, endings: Iterable[str]) -> bool:
    """Return whether a layer's name ends in one of these, part by part."""
    return any(layer.name == ending or layer.name.endswith(f".{ending}") for ending in endings)


def _told(block: Sequence[Layer], family: Family, source: str) -> list[Role]:
    roles = []
    for layer in block:
        cut = "columns" if named(layer, family.columns) else "rows" if named(layer, family.rows) else None
        if cut is None:
            continue
        parts = next((n for ending, n in family.fused.items() if named(layer, (ending,))), 1)
        attention = named(layer, family.attention)
        keys = named(layer, family.keys)
        roles.append(
            Role(layer=layer, cut=cut, parts=parts, attention=attention, keys=keys, why=f"{source} says {cut}")
        )
    return roles


def _by_shape(block: Sequence[Layer]) -> list[Role]:
    """An up and a down projection; a threefold projection and one back; several projections and one back."""
    narrow = min((layer.inputs for layer in block), default=0)
    ups = [layer for layer in block if layer.outputs > layer.inputs]
    downs = [layer for layer in block if layer.inputs > layer.outputs]
    square = [layer for layer in block if layer.inputs == layer.outputs == narrow]
    wide = {layer.outputs for layer in ups}
    if downs and wide == {layer.inputs for layer in downs}:
        return [
            *(Role(layer=one, cut="columns", why="it widens what a sibling narrows again") for one in ups),
            *(Role(layer=one, cut="rows", why="it narrows what a sibling widened") for one in downs),
        ]
    if len(ups) == 1 and len(square) == 1 and ups[0].outputs == 3 * ups[0].inputs:
        return [
            Role(layer=ups[0], cut="columns", parts=3, attention=True, why="it makes thrice its input"),
            Role(layer=square[0], cut="rows", attention=True, why="it stands after a threefold projection"),
        ]
    if len(block) == 4 and len(square) >= 2 and block[-1] in square:
        return [
            *(Role(layer=one, cut="columns", attention=True, why="one of three projections") for one in block[:-1]),
            Role(layer=block[-1], cut="rows", attention=True, why="the last of four projections"),
        ]
    return []
