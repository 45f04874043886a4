"""Parallelizing a model and making its optimizer: the two lines of a script that know of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from vescale_train import dmodule
from vescale_train.ddp import DDPOptions, DistributedDataParallel
from vescale_train.errors import ConfigError
from vescale_train.mesh import batch_group
from vescale_train.optim import BasicOptimizer, DistributedOptimizer
from vescale_train.planner import propose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.plan import Plan


def optimizer(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    *,
    params: Iterable[Any] | None = None,
    clip_grad: float = 0.0,
    zero: Literal[0, 1, 2] | None = None,
    **options: Any,
) -> BasicOptimizer | DistributedOptimizer:
    """Return an optimizer of a parallelized model that sums gradients over the data-parallel ranks; collective.

    Args:
        model: what ``parallelize`` returned.
        make: a class of ``torch.optim``, or any function like one: of parameters or groups, and options.
        params: parameters or groups; None: all of the model.
        clip_grad: largest norm of all gradients together; 0 does not clip.
        zero: 0: every rank updates everything; 1: the optimizer's state is shared out; 2: the gradients too. None: 1
            where several ranks see different data.
        options: of the optimizer: ``lr=...``.

    Raises:
        ConfigError: ``zero`` is something else, or the optimizer cannot be shared out.
        StateError: the model was not parallelized.
    """
    found = dmodule.attached(model)
    group = batch_group(found.mesh)
    if zero is None:
        zero = 1 if group is not None and group.size() > 1 else 0
    if zero not in {0, 1, 2}:
        raise ConfigError(f"unknown zero={zero!r}: choose 0, 1 or 2")
    plain = make(model.parameters() if params is None else params, **options)
    wrapped = DistributedDataParallel(
        model,
        _alone() if group is None else group.get_group(),
        use_distributed_optimizer=zero > 0,
        options=DDPOptions(exact=found.exact, mean_over="passes", shard_gradients=zero == 2),
    )
    made = BasicOptimizer if zero == 0 else DistributedOptimizer
    return made(plain, wrapped, clip_grad=clip_grad)


def _alone() -> dist.ProcessGroup:
    """Return the group of this rank alone, for models that are not data-parallel."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Literal["auto"] | Plan | Mapping[str, Any] = "auto",
    *,
    exact: bool = False,
    seed: int = 0,
    allow: Iterable[str] = (),
) -> nn.Module:
    """Make a model parallel as a plan says, and return it: the same object, of the same class, with the same names.

    Args:
        model: any ``nn.Module``; it stays unchanged but for its parameters.
        mesh: from ``init``.
        plan: "auto" looks at the model and proposes one (``planner.propose``).
        exact: give the bits of one device on every mesh.
        seed: of the model's random numbers.
        allow: kinds of problems of the plan that are no errors here.

    Raises:
        PlanError: the plan does not fit the model.
        StateError: the model is parallel already.
    """
    chosen = propose(model, mesh) if plan == "auto" else plan
    return dmodule.apply(model, mesh, chosen, exact=exact, seed=seed, allow=allow)
