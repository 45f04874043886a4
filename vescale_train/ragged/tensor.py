"""Making a ``DTensor`` with a ragged shard: of a whole tensor, or of what each rank has of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_train.errors import LayoutError
from vescale_train.ragged.redistribute import local_shape_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a tensor that every rank has whole, and equal, as each rank's part of it; nothing is sent.

    Raises:
        LayoutError: the placements do not fit its shape.
    """
    whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, list(placements))


def from_local(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return the ``DTensor`` of which every rank has its part.

    Args:
        local: this rank's part; its first dim is the flattened ones.
        mesh: of all ranks that hold a part.
        placements: one per axis, one of them ragged.
        shape: of the whole tensor.

    Raises:
        LayoutError: the local tensor has not the shape that the placements give it here.
    """
    expected = local_shape_of(tuple(shape), mesh, tuple(placements))
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"shape {tuple(shape)} laid out by {tuple(placements)} gives this rank a local tensor of shape {expected}, "
            f"but it holds {tuple(local.shape)}"
        )
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=stride)
