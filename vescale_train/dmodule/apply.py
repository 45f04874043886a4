"""Applying a plan to a model: the one story that all other files of this room are chapters of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_train.dmodule.attached import Attached, attach

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def apply(model: nn.Module, mesh: DeviceMesh, plan: Any, *, exact: bool = False, seed: int = 0) -> nn.Module:
    """Make the model parallel over ``mesh`` as ``plan`` says, and return it: same object, same class, same names."""
    attach(model, Attached(mesh=mesh, plan=plan, exact=exact, seed=seed))
    return model
