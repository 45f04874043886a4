"""veScale's names for applying a plan, with their meaning there; the work is done by ``apply``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from vescale_train.dmodule.apply import apply
from vescale_train.dmodule.attached import is_attached
from vescale_train.errors import ConfigError
from vescale_train.mesh import axis, current

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from vescale_train.plan import Plan


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    sharding_plan: Plan | Mapping[str, Any],
    *,
    factory: bool | None = None,
    exact: bool = False,
) -> nn.Module:
    """Make a module parallel and return it: ``sharding_plan`` is ``{"parameter": {...}, "forward": {...}}``.

    Keys are regexes of whole names; parameters that no key names are replicated. Tensors that are made in forward join
    as replicated ones, whatever ``factory`` says.

    Args:
        module: changed in place.
        device_mesh: a mesh with a ``tp`` axis, or one of a single axis, of any name or none.
        sharding_plan: which parameter is cut how, and how values are laid out at the edges of modules.
        factory: taken for the sake of callers; both give the same.
        exact: give the bits of one device.

    Raises:
        PlanError: if the plan does not fit the module.
        ConfigError: if the mesh has several axes and none of them is ``tp``.
    """
    if isinstance(factory, dict):
        raise ConfigError(
            "cannot lay out factories one by one: what is made in forward is replicated; "
            "lay it out at an edge of the module that takes it"
        )
    return apply(module, _with_tensor_axis(device_mesh), sharding_plan, exact=exact)


def DModule(  # noqa: N802 - a familiar name
    module: nn.Module, device_mesh: DeviceMesh | None = None, sharding_plan: Plan | Mapping[str, Any] | None = None
) -> nn.Module:
    """Return the module made parallel over a mesh, by default the current one; what no plan names stays whole."""
    return parallelize_module(module, device_mesh or current(), sharding_plan or {})


def is_dmodule(module: nn.Module) -> bool:
    """Return whether the module has been made parallel."""
    return is_attached(module)


def _with_tensor_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh, or the same ranks under the name ``tp`` if it has a single axis of another name."""
    if mesh.mesh_dim_names and axis(mesh, "tp") is not None:
        return mesh
    if mesh.ndim != 1:
        raise ConfigError(
            f"cannot tell the tensor parallel axis of {mesh}: name one 'tp', or pass a slice of a single axis"
        )
    return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=("tp",))
