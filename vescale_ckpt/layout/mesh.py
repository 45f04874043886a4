"""A mesh: an n-d array of ranks, numbered in row-major order; arithmetic on its coordinates.

A mesh is only its shape here. Which process sits at a coordinate is known to adapters.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from vescale_ckpt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator


def coordinates(mesh_shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every coordinate in row-major order; one ``()`` for a mesh without axes."""
    yield from itertools.product(*map(range, mesh_shape))


def coordinate_of(mesh_shape: tuple[int, ...], index: int) -> tuple[int, ...]:
    """Return the coordinate at a row-major index.

    Raises:
        LayoutError: if the mesh has no such index.
    """
    if not 0 <= index < math.prod(mesh_shape):
        raise LayoutError(f"index {index} asked of the mesh {mesh_shape} of {math.prod(mesh_shape)} ranks")
    coordinate: list[int] = []
    for size in reversed(mesh_shape):
        index, at = divmod(index, size)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def index_of(mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
    """Return the row-major index of a coordinate.

    Raises:
        LayoutError: if the coordinate is not on the mesh.
    """
    check_coordinate(mesh_shape, coordinate)
    index = 0
    for size, at in zip(mesh_shape, coordinate, strict=True):
        index = index * size + at
    return index


def check_coordinate(mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
    """Refuse a coordinate that is not on the mesh.

    Raises:
        LayoutError: if it has another number of axes or reaches past one.
    """
    fits = len(coordinate) == len(mesh_shape)
    if not fits or any(not 0 <= at < size for at, size in zip(coordinate, mesh_shape, strict=True)):
        raise LayoutError(f"coordinate {coordinate} is not on the mesh {mesh_shape}")
