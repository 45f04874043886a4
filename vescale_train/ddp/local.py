"""Local memory: the part of a parameter that is on this rank, and gradients in the parameter's own form.

A ``DTensor`` parameter (tensor parallelism) is handled through its local tensor: all that data parallelism does to it
is element-wise over ranks that hold the same part.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from vescale_train.torch_private import set_local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, detached, as a view of the same memory."""
    with torch.no_grad():
        found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, laid out as its parameter is.

    A gradient that is a pending sum over another axis (a norm's weight under sequence parallelism) is summed there.
    """
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        if tuple(gradient.placements) != tuple(parameter.placements):
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return local_of(gradient)
    return gradient.detach()


def like_parameter(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's own form (plain or ``DTensor``) on this local memory."""
    shaped = local.view(local_of(parameter).shape)
    if not isinstance(parameter, DTensor):
        return shaped
    return DTensor.from_local(
        shaped,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def move_to(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Make a parameter live in ``memory``, a contiguous view of as many elements, with the values that it has."""
    found = local_of(parameter)
    target = memory.view(found.shape)
    target.copy_(found)
    if isinstance(parameter, DTensor):
        set_local(parameter, target)
    else:
        parameter.data = target
