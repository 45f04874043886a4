"""Names and sizes of mesh axes: from what a user asked for to the shape of the mesh, without a process group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vescale_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
"""Every axis, outermost first: neighbours on the innermost axis talk most, so they get neighbouring ranks."""

BATCH_AXES = ("dp", "fsdp")
"""The axes along which ranks see different data."""

REST = -1
"""As a size: however many ranks the other axes leave."""


def resolve_sizes(asked: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    """Return the axes of the mesh with their sizes, outermost first.

    Args:
        asked: axis -> size; ``None`` for an axis that was not named, ``-1`` for the rest of the ranks.
        world_size: how many ranks there are.

    Returns:
        The axes that were named, or ``dp`` alone if none was. Their product is ``world_size``.

    Raises:
        ConfigError: for an unknown axis, an impossible size, two rests, or a product that is not the world.
    """
    unknown = sorted(set(asked) - set(AXES))
    if unknown:
        raise ConfigError(f"cannot make a mesh with axes {unknown}: the axes are {', '.join(AXES)}")
    named = {axis: size for axis in AXES if (size := asked.get(axis)) is not None}
    for axis, size in named.items():
        if size < 1 and size != REST:
            raise ConfigError(f"cannot make a mesh with {axis}={size}: a size is 1 or more, or -1 for the rest")
    rests = [axis for axis, size in named.items() if size == REST]
    if len(rests) > 1:
        raise ConfigError(
            f"cannot make a mesh with {' and '.join(f'{axis}=-1' for axis in rests)}: one may be the rest"
        )
    fixed = math.prod(size for size in named.values() if size != REST)
    if rests:
        if world_size % fixed:
            raise ConfigError(
                f"cannot make a mesh: its fixed axes hold {fixed} ranks, which do not divide {world_size}"
            )
        named[rests[0]] = world_size // fixed
    elif fixed != world_size:
        said = ", ".join(f"{axis}={size}" for axis, size in named.items()) or "no axis"
        raise ConfigError(
            f"cannot make a mesh of {world_size} ranks: {said} asked for {fixed}; "
            f"start {fixed} ranks, or give one axis the size -1 (the rest)"
        )
    return named or {"dp": 1}
