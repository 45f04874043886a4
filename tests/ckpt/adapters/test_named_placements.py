from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_ckpt.adapters.tensors import hold
from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.placement import Ragged


@dataclass(frozen=True)
class Named(Placement):
    """A placement that torch does not know and that says which of ours it is."""

    units: tuple[int, ...]

    def checkpoint_placement(self):
        return Ragged((0,), self.units)


@dataclass(frozen=True)
class Nameless(Placement):
    """A placement that nobody knows."""


def tensor(placements, local_shape, shape, mesh):
    local = torch.zeros(local_shape)
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def test_a_placement_that_says_what_it_is_is_held_by_that(fake_world):
    fake_world(1, 4)
    held = hold(tensor([Named((1, 2, 0, 1))], (4, 3), (8, 3), init_device_mesh("cpu", (4,))), "w")
    assert [piece.box for piece in held.pieces] == [Box((2, 0), (4, 3))]


def test_it_cuts_what_the_other_axes_have_left(fake_world):
    fake_world(3, 4)  # (1, 1) of the mesh
    mesh = init_device_mesh("cpu", (2, 2))
    held = hold(tensor([Named((1, 3)), Shard(0)], (3, 3), (8, 3), mesh), "w")
    assert [piece.box for piece in held.pieces] == [Box((5, 0), (3, 3))]


def test_one_that_says_nothing_is_refused(fake_world):
    fake_world(0, 4)
    with pytest.raises(LayoutError, match="is not known here"):
        hold(tensor([Nameless()], (2, 3), (8, 3), init_device_mesh("cpu", (4,))), "w")
