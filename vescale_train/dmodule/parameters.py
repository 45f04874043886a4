"""Parameters become DTensors in place: same names, tied ones stay one, gradients are laid out as parameters are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from vescale_train.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.plan import Placements


def distribute_parameters(model: nn.Module, mesh: DeviceMesh, placed: Mapping[str, Placements]) -> None:
    """Replace every parameter by a DTensor over ``mesh``, which has one axis.

    The values are those of the axis's first rank. On the meta device nothing is sent and nothing is held.

    Args:
        model: changed in place.
        mesh: the tensor parallel axis.
        placed: first name of a parameter -> its placements; the others are replicated.

    Raises:
        StateError: if a parameter is a DTensor already.
    """
    made: dict[int, nn.Parameter] = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for short, parameter in module._parameters.items():  # noqa: SLF001 - the only place where a tie can be kept
            if parameter is None:
                continue
            if id(parameter) not in made:
                name = first[id(parameter)]
                made[id(parameter)] = _distributed(name, parameter, mesh, placed.get(name, (Replicate(),)))
            module._parameters[short] = made[id(parameter)]  # noqa: SLF001


def _distributed(name: str, parameter: nn.Parameter, mesh: DeviceMesh, placements: Placements) -> nn.Parameter:
    if isinstance(parameter, DTensor):
        raise StateError(
            f"cannot lay out {name!r}: it is a DTensor already, as {parameter.placements}; "
            "parallelize a model once, and before fully_shard"
        )
    values = parameter.detach()
    if not values.is_meta and mesh.size() > 1:
        values = values.contiguous()
        dist.broadcast(values, group=mesh.get_group(), group_src=0)
    cut = distribute_tensor(values, mesh, placements, src_data_rank=None)
    local = cut.to_local()
    if local.untyped_storage().nbytes() > local.nbytes:  # a view would keep the whole parameter alive
        cut = DTensor.from_local(
            local.clone(), mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
        )
    made = nn.Parameter(cut, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    if made.requires_grad:
        made.register_hook(partial(settle_gradient, cut.placements))  # type: ignore[no-untyped-call]
    return made


def settle_gradient(placements: Placements, gradient: Tensor) -> Tensor:
    """Return a gradient laid out as its parameter: what ranks hold terms of is summed, once a backward."""
    if isinstance(gradient, DTensor) and gradient.placements != tuple(placements):
        with torch.no_grad():
            return gradient.redistribute(placements=placements)
    return gradient
