"""Linear layers on cut weights: columns, rows, interleaved columns; as ``linear`` and as ``addmm``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.nn import functional

from vescale_train.dmodule.layouts import cut_as, is_partial, laid, plain, sharded_dim, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh


def linear(mesh: DeviceMesh, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002
    """``x @ weight.T + bias`` where weight is [outputs, inputs]."""
    return _product(mesh, functional.linear, input, weight, bias, outputs_dim=0)


def addmm(mesh: DeviceMesh, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:  # noqa: A002
    """``bias + x @ weight`` where weight is [inputs, outputs], as in GPT-2's layers."""
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return NotImplemented

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    return _product(mesh, run, mat1, mat2, input, outputs_dim=1)


def _product(
    mesh: DeviceMesh,
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    outputs_dim: int,
) -> Any:
    """Choose by how the weight is cut; what is no parameter of two dims on this axis is left to the general rule."""
    if not isinstance(weight, DTensor) or weight.ndim != 2 or is_partial(weight):
        return NotImplemented
    x = plain(x) if is_partial(x) else x
    cut = sharded_dim(weight)
    if cut is None:
        return _whole_weight(mesh, run, x, weight, bias)
    if cut == outputs_dim:
        return _by_outputs(mesh, run, x, weight, bias)
    return _by_inputs(mesh, run, x, weight, bias)


def _by_outputs(
    mesh: DeviceMesh, run: Callable[..., Tensor], x: Tensor, weight: DTensor, bias: Tensor | None
) -> Tensor:
    """Each rank makes some of the outputs from all inputs; the input's gradient is a sum over ranks."""
    outputs = weight.numel() // x.shape[-1]
    local_bias = None
    if bias is not None:
        local_bias = laid(bias, mesh, [cut_as(weight.placements[0], 0)]).to_local()
    local_x = laid(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    local = run(local_x, weight.to_local(), local_bias)
    return wrap(local, mesh, cut_as(weight.placements[0], x.ndim - 1), (*x.shape[:-1], outputs))


def _by_inputs(mesh: DeviceMesh, run: Callable[..., Tensor], x: Tensor, weight: DTensor, bias: Tensor | None) -> Tensor:
    """Each rank brings a term of every output, made from some of the inputs."""
    outputs = weight.numel() // x.shape[-1]
    local_x = laid(x, mesh, [cut_as(weight.placements[0], x.ndim - 1)]).to_local()
    local = run(local_x, weight.to_local(), None)
    if bias is not None:
        first = mesh.get_local_rank() == 0
        whole_bias = laid(bias, mesh, [Replicate()]).to_local()
        local = _AddOnce.apply(local, whole_bias, first)  # type: ignore[no-untyped-call]
    return wrap(local, mesh, Partial(), (*x.shape[:-1], outputs))


def _whole_weight(mesh: DeviceMesh, run: Callable[..., Tensor], x: Tensor, weight: DTensor, bias: Tensor | None) -> Any:
    """Each rank works on the rows of the input that it holds; gradients of weights are then sums over ranks."""
    rows = sharded_dim(x)
    if not isinstance(x, DTensor) or rows is None or rows == x.ndim - 1:
        return run(plain(x), plain(weight), None if bias is None else plain(bias))
    local_bias = None if bias is None else laid(bias, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    local = run(x.to_local(), weight.to_local(grad_placements=[Partial()]), local_bias)
    return wrap(local, mesh, x.placements[0], _shape(x, weight))


def _shape(x: Tensor, weight: Tensor) -> Sequence[int]:
    return (*x.shape[:-1], weight.numel() // x.shape[-1])


class _AddOnce(torch.autograd.Function):
    """Adds a bias on one rank, so that the sum over ranks has it once; its gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, bias: Tensor, here: bool) -> Tensor:
        ctx.dims = tuple(range(term.ndim - 1))
        return term + bias if here else term.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient, gradient.sum(ctx.dims), None
