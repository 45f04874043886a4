"""veScale's name for a module that is made parallel without a plan of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_train.dmodule import parallelize_module
from vescale_train.errors import ConfigError
from vescale_train.mesh import axis
from vescale_train.planner.propose import propose

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

POLICIES = ("auto", "megatron")


def auto_parallelize_module(
    module: nn.Module, device_mesh: DeviceMesh, policy: str = "auto", *, sequence: bool = False, exact: bool = False
) -> nn.Module:
    """Make a module parallel by a plan that is proposed for it, and return it.

    Args:
        module: changed in place.
        device_mesh: a mesh with a ``tp`` axis, or one of a single axis.
        policy: ``"auto"`` or ``"megatron"``, in any case: columns, then rows, then one sum.
        sequence: also share out the residual stream along the sequence, where its family is known.
        exact: give the bits of one device.

    Raises:
        ConfigError: for another policy.
    """
    if policy.lower() not in POLICIES:
        raise ConfigError(f"cannot plan by {policy!r}: the policies are {', '.join(POLICIES)}")
    named = device_mesh.mesh_dim_names
    part = axis(device_mesh, "tp") if named else None
    num_ranks = (part or device_mesh).size()
    return parallelize_module(module, device_mesh, propose(module, num_ranks, sequence=sequence), exact=exact)
