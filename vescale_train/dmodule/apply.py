"""Applying a plan to a model: the one story that all other files of this room are chapters of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_train.dmodule.attached import Attached, attach, is_attached
from vescale_train.dmodule.edges import hook_edges
from vescale_train.dmodule.parameters import distribute_parameters
from vescale_train.dmodule.region import ExactRegion, Region
from vescale_train.dmodule.rules import RULES
from vescale_train.dmodule.scope import Scope
from vescale_train.errors import StateError
from vescale_train.mesh import axis
from vescale_train.plan import Names, Plan, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | Mapping[str, Any],
    *,
    exact: bool = False,
    seed: int = 0,
    allow: Iterable[str] = (),
) -> nn.Module:
    """Make the model parallel over the mesh's ``tp`` axis as the plan says, and return it.

    It is the same object, of the same class, with the same names. Its parameters become DTensors; called with plain
    tensors, which must be the same on all ranks of the axis, it returns plain tensors. Gradients of parameters are laid
    out as the parameters are. A mesh without a ``tp`` axis leaves the model as it is, apart from a check of the plan.

    Args:
        model: on any device; on the meta device parameters are cut without being made.
        mesh: as ``vescale_train.init`` returns it.
        plan: a plan, or a dict with its parts.
        exact: give the bits of one device: parameters stay cut as planned, every computation runs whole.
        seed: of the model's random numbers.
        allow: kinds of problems of the plan that are no errors here, such as ``"unmatched"``.

    Raises:
        PlanError: if the plan does not fit the model, listing everything that is wrong.
        StateError: if the model is parallel already.
    """
    if is_attached(model):
        raise StateError(f"cannot parallelize this {type(model).__name__} again: it is parallel already")
    plan = Plan.of(plan)
    tensor_axis = axis(mesh, "tp")
    resolved = resolve(plan, Names.of(model), 1 if tensor_axis is None else tensor_axis.size())
    resolved.report.raise_problems(allow)
    if tensor_axis is not None:
        distribute_parameters(model, tensor_axis, resolved.parameters)
        if not exact:
            hook_edges(model, tensor_axis, resolved.edges)
        Scope(ExactRegion() if exact else Region(tensor_axis, RULES)).watch(model)
    attach(model, Attached(mesh=mesh, plan=plan, exact=exact, seed=seed))
    return model
