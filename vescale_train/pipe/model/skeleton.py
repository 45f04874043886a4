"""A model without weights, to see what flows between its units: the same code, parameters without data."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.torch_fakes import StandIns

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class Skeleton:
    """A copy of a model that has shapes and no weights.

    Made before the model is cut, so that every rank knows all of it. Buffers are copied with their values, since the
    code between units may look at them; hooks are left out.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.stand_ins = StandIns()
        memo: dict[int, Any] = {}
        for tensor, is_parameter in _tensors(model):
            made = self._weightless(tensor, device)
            if is_parameter:
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            if is_parameter or tensor.device.type == "meta":
                memo[id(tensor)] = made
        try:
            self.model = copy.deepcopy(model, memo)
        except (RuntimeError, TypeError) as error:
            raise SplitError(
                f"cannot look into {type(model).__name__}: a copy without weights fails ({error}); build stages before "
                "the model is wrapped, and without tensors that carry gradients among its attributes"
            ) from error
        for module in self.model.modules():
            for name in _HOOKS:
                getattr(module, name).clear()

    def _weightless(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self.stand_ins.make(tensor.shape, None, tensor.dtype, device)


def _tensors(model: nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    yield from ((parameter, True) for parameter in model.parameters())
    yield from ((buffer, False) for buffer in model.buffers())
