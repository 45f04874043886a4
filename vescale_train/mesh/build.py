"""Making the mesh: one call that starts the ranks and names what each axis of them is for."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_train.errors import ConfigError
from vescale_train.mesh.axes import resolve_sizes
from vescale_train.mesh.made import use
from vescale_train.mesh.start import default_device, start
from vescale_train.torch_private import set_group_timeout

TIMEOUT_SECONDS = 600.0


def init(
    *,
    pp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    tp: int | None = None,
    device: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> DeviceMesh:
    """Return the mesh of all ranks, with the named axes from outside in: pp, dp, fsdp, cp, ep, tp.

    The process group starts from torchrun's environment if it has not started yet; without torchrun this process is
    a world of one. An axis that is not named is left out of the mesh; ``-1`` stands for the rest of the ranks.

    Args:
        pp: pipeline stages.
        dp: replicas of the model that see different data.
        fsdp: ranks that see different data and share the parameters among them.
        cp: parts of the sequence, for context parallelism.
        ep: groups of experts.
        tp: parts of the layers, for tensor parallelism.
        device: ``"cpu"`` or ``"cuda"``; by default the GPU if there is one.
        timeout_seconds: how long a collective may take before it is an error.

    Raises:
        ConfigError: if the sizes do not make up the world, or torchrun's environment is there in part.
    """
    if timeout_seconds <= 0:
        raise ConfigError(f"cannot give collectives {timeout_seconds} s: a timeout is more than 0")
    timeout = timedelta(seconds=timeout_seconds)
    device = device or default_device()
    start(device, timeout)
    sizes = resolve_sizes({"pp": pp, "dp": dp, "fsdp": fsdp, "cp": cp, "ep": ep, "tp": tp}, dist.get_world_size())
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        set_group_timeout(group, timeout)
    use(mesh)
    return mesh
