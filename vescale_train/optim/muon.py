"""Muon over many ranks: each matrix is orthogonalised whole, by one rank, and what comes of it goes to the others.

Newton-Schulz needs a matrix whole, and costs as much as a few layers: so matrices are shared out, heaviest first. The
owner runs torch's own Muon; momentum is on the owner alone, and a checkpoint stores it as if Muon were plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vescale_ckpt.state.sharded_view import ShardedView
from vescale_train.ddp import DistributedDataParallel
from vescale_train.ddp.collectives import group_rank, group_size
from vescale_train.ddp.local import local_of
from vescale_train.errors import ConfigError, StateError
from vescale_train.optim.norm import clip_grad_norm
from vescale_train.optim.state_dict import copy_options, load_named_state, named_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One parameter and who updates it."""

    parameter: nn.Parameter
    data_owner: int
    """Rank in the data-parallel group."""
    mesh_owner: int
    """Rank along the one axis that a ``DTensor`` lies on; 0 for a plain one."""
    work: nn.Parameter
    """What the owner's Muon steps on: the parameter itself, or a whole copy of a ``DTensor``."""


class MuonByOwner(torch.optim.Optimizer):
    """Steps torch's Muon on the matrices that this rank owns and hands out the results.

    Args:
        optimizer: a ``torch.optim.Muon`` for parameters of the models, not stepped yet; it is taken over.
        models: wrapped with data parallelism, with whole gradients.
        clip_grad: largest norm of all gradients of the models together; 0 does not clip.
        exact: take that norm in exact mode; by default where a model is in it.
        pipeline_group: the ranks that hold the other stages of the same model, for the norm.

    Raises:
        ConfigError: another optimizer, sharded gradients, or a matrix on a mesh of several axes.
        StateError: the optimizer has stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: DistributedDataParallel | Sequence[DistributedDataParallel],
        *,
        clip_grad: float = 0.0,
        exact: bool | None = None,
        pipeline_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.models = (models,) if isinstance(models, DistributedDataParallel) else tuple(models)
        self.optimizer = optimizer
        """torch's, on the matrices of this rank."""
        self.clip_grad = clip_grad
        self.grad_norm: torch.Tensor | None = None
        """Norm of all gradients of the last step, before clipping; None unless ``clip_grad``."""
        self._exact = any(model.options.exact for model in self.models) if exact is None else exact
        self._pipeline_group = pipeline_group
        self._refuse_unfit()
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._group = self.models[0].group
        parameters = [p for group in self.param_groups for p in group["params"]]
        owners = share_out([_cost(p) for p in parameters], group_size(self._group), [_axis_size(p) for p in parameters])
        self._matrices = [
            Matrix(p, owner, on_axis, nn.Parameter(local_of(p).new_empty(0)) if isinstance(p, DTensor) else p)
            for p, (owner, on_axis) in zip(parameters, owners, strict=True)
        ]
        mine = {id(m.parameter): m.work for m in self._matrices if self._owns(m)}
        for group in optimizer.param_groups:
            group["params"] = [mine[id(p)] for p in group["params"] if id(p) in mine]
        self._names = {id(p): name for m in self.models for name, p in m.module.named_parameters()}
        self.state = _OwnedState(optimizer, self._matrices, self._owns)  # type: ignore[assignment]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce gradients that are not reduced yet, clip, update, and hand out the matrices; on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for model in self.models:
            model.finish_grad_sync()
        with torch.no_grad():
            if self.clip_grad > 0:
                self.grad_norm = clip_grad_norm(
                    [model.module for model in self.models],
                    self.clip_grad,
                    pipeline_group=self._pipeline_group,
                    exact=self._exact,
                )
            updated = [matrix for matrix in self._matrices if matrix.parameter.grad is not None]
            for matrix in updated:
                self._gather(matrix)
            copy_options(self.param_groups, to=self.optimizer.param_groups)
            self.optimizer.step()
            for work in [self._hand_out(matrix) for matrix in updated]:
                if work is not None:
                    work.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, in the buffers too."""
        for model in self.models:
            model.zero_grad(set_to_none)
        for matrix in self._matrices:
            matrix.work.grad = None

    def new_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> ShardedView:
        """Return fresh memory for one value of a parameter's state: all of it on its owner, nothing elsewhere."""
        (matrix,) = (m for m in self._matrices if m.parameter is parameter)
        if not self._owns(matrix):
            return ShardedView(tuple(parameter.shape), dtype)
        return _whole_view(torch.empty(parameter.shape, dtype=dtype, device=local_of(parameter).device))

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state by parameters' names; a matrix's momentum is on its owner."""
        return named_state(self, self._names)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` of this, or of a plain Muon of the same model, returned.

        Raises:
            InvalidInputError: it names other parameters or groups.
        """
        load_named_state(self, state_dict, self._names)

    def _owns(self, matrix: Matrix) -> bool:
        return self._is_data_owner(matrix) and _axis_rank(matrix.parameter) == matrix.mesh_owner

    def _is_data_owner(self, matrix: Matrix) -> bool:
        return group_rank(self._group) == matrix.data_owner

    def _gather(self, matrix: Matrix) -> None:
        """Bring a ``DTensor`` and its gradient whole to the owner, from the ranks along its axis."""
        parameter = matrix.parameter
        if not isinstance(parameter, DTensor) or not self._is_data_owner(matrix):
            return
        gradient: Any = parameter.grad
        whole, whole_gradient = parameter.full_tensor(), gradient.full_tensor()
        if self._owns(matrix):
            matrix.work.data, matrix.work.grad = whole, whole_gradient

    def _hand_out(self, matrix: Matrix) -> dist.Work | None:
        """Bring an updated matrix to all ranks: along its axis first, then to the other data-parallel ranks."""
        parameter = matrix.parameter
        local = local_of(parameter)
        if isinstance(parameter, DTensor) and self._is_data_owner(matrix):
            whole = matrix.work.detach() if self._owns(matrix) else local.new_empty(parameter.shape)
            cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=matrix.mesh_owner)
            local.copy_(local_of(cut))
            matrix.work.data, matrix.work.grad = local.new_empty(0), None
        if group_size(self._group) == 1:
            return None
        work: dist.Work | None = dist.broadcast(local, group=self._group, group_src=matrix.data_owner, async_op=True)
        return work

    def _refuse_unfit(self) -> None:
        kind = type(self.optimizer).__name__
        if not isinstance(self.optimizer, torch.optim.Muon):
            raise ConfigError(f"cannot share out the matrices of {kind}: one owner a matrix is for torch.optim.Muon")
        if self.optimizer.state:
            raise StateError(f"this {kind} has state already; make it anew, wrap it, then load its state")
        if not self.models or any(model.is_sharded for model in self.models):
            raise ConfigError(f"{kind} needs whole gradients; wrap the models with use_distributed_optimizer=False")
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
                raise ConfigError(
                    f"cannot hand out a matrix on the mesh {parameter.device_mesh}: only one axis besides the "
                    f"data-parallel ones is known how to"
                )


class _OwnedState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """Whole parameter -> its state, on the rank that owns it; nothing elsewhere."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, matrices: Sequence[Matrix], owns: Callable[[Matrix], bool]
    ) -> None:
        self._state: dict[Any, Any] = optimizer.state
        self._owned = {id(m.parameter): m for m in matrices if owns(m)}

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        found = self._state.get(self._owned[id(parameter)].work)
        if not found:
            raise KeyError(parameter)
        return {key: _whole_view(value) if _is_matrix(value) else value for key, value in found.items()}

    def __setitem__(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        matrix = self._owned.get(id(parameter))
        if matrix is not None:
            self._state[matrix.work] = {key: _memory(value) for key, value in values.items()}

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._state[self._owned[id(parameter)].work]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (m.parameter for m in self._owned.values() if self._state.get(m.work))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def share_out(costs: Sequence[int], num_ranks: int, axis_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each matrix (rank, rank along its own axis) of who updates it: the heaviest first, to who has least.

    Raises:
        ConfigError: no ranks.
    """
    if num_ranks < 1:
        raise ConfigError(f"cannot share {len(costs)} matrices out over {num_ranks} ranks")
    loads: dict[tuple[int, int], int] = {}
    owners: list[tuple[int, int]] = [(0, 0)] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        places = [(rank, at) for rank in range(num_ranks) for at in range(axis_sizes[index])]
        owner = min(places, key=lambda place: (loads.get(place, 0), place))
        loads[owner] = loads.get(owner, 0) + costs[index]
        owners[index] = owner
    return owners


def _cost(parameter: torch.Tensor) -> int:
    """Return what Newton-Schulz costs, up to a factor."""
    rows, columns = parameter.shape
    return min(rows, columns) ** 2 * max(rows, columns)


def _axis_size(parameter: torch.Tensor) -> int:
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1


def _axis_rank(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 0
    mesh: DeviceMesh = parameter.device_mesh
    return mesh.get_local_rank()


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


def _whole_view(value: torch.Tensor) -> ShardedView:
    return ShardedView(tuple(value.shape), value.dtype, [((0,) * value.ndim, value)])


def _memory(value: Any) -> Any:
    """Return what the plain Muon is to hold."""
    found = value.pieces[0][1] if isinstance(value, ShardedView) else value
    return found.clone() if isinstance(found, torch.Tensor) else found
