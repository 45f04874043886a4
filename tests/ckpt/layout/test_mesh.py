from __future__ import annotations

import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.layout.mesh import check_coordinate, coordinate_of, coordinates, index_of


@pytest.mark.parametrize("mesh_shape", [(), (1,), (5,), (2, 3), (2, 1, 4)])
def test_coordinates_are_numbered_row_major(mesh_shape) -> None:
    found = list(coordinates(mesh_shape))
    assert found == sorted(found)
    assert [index_of(mesh_shape, c) for c in found] == list(range(len(found)))
    assert [coordinate_of(mesh_shape, i) for i in range(len(found))] == found


def test_a_mesh_without_axes_is_one_rank() -> None:
    assert list(coordinates(())) == [()]
    check_coordinate((), ())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: coordinate_of((2, 3), 6),
        lambda: coordinate_of((2, 3), -1),
        lambda: index_of((2, 3), (0, 3)),
        lambda: index_of((2, 3), (-1, 0)),
        lambda: index_of((2, 3), (0,)),
        lambda: check_coordinate((), (0,)),
    ],
)
def test_what_is_not_on_the_mesh_is_refused(wrong) -> None:
    with pytest.raises(LayoutError, match="mesh"):
        wrong()
