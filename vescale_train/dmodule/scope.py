"""Where a region begins and ends: with the outermost call of a module of the model, in each thread for itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vescale_train.dmodule.layouts import plain
from vescale_train.torch_private import no_torch_function

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode


class Scope:
    """Keeps the region of one model active while any of its modules runs.

    Every module's call counts, and not the model's alone: a checkpointed block runs again in backward, by itself, and
    somebody may call a part of the model.
    """

    def __init__(self, region: TorchFunctionMode) -> None:
        self.region = region
        self._here = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        """A copy of a model runs under the same rules."""
        return self

    def watch(self, model: nn.Module) -> None:
        """Begin and end with every module's call."""
        for module in model.modules():
            module.register_forward_pre_hook(self._begin, prepend=True)
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        depth = getattr(self._here, "depth", 0)
        if depth == 0:
            self.region.__enter__()  # type: ignore[no-untyped-call]
        self._here.depth = depth + 1

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        self._here.depth -= 1
        if self._here.depth:
            return None
        self.region.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return whole(output)


def whole(output: Any) -> Any:
    """Return what a model gave with every DTensor in it gathered: who called it knows of no ranks."""
    with no_torch_function():
        return tree_map_only(Tensor, plain, output)
