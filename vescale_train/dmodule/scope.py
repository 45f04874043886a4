"""Where a region begins and ends: with the outermost call of a module of the model, in each thread for itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vescale_train.dmodule.layouts import plain
from vescale_train.torch_private import function_modes, is_in_backward, no_torch_function

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode


class Scope:
    """Keeps the region of one model active while any of its modules runs.

    Every module's call counts, and not the model's alone, since somebody may call a part of the model. In backward,
    where a checkpointed part runs again, the region stays: that part may be any function, of which only the modules
    that it calls are seen here. The autograd engine itself puts a thread's modes back after every node that it ran.
    """

    def __init__(self, region: TorchFunctionMode) -> None:
        self.region = region
        self._here = _Here()

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        """A copy of a model runs under the same rules."""
        return self

    def watch(self, model: nn.Module) -> None:
        """Begin and end with every module's call."""
        for module in model.modules():
            module.register_forward_pre_hook(self._begin, prepend=True)
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        here = self._here
        if here.depth == 0 and self.region not in function_modes():
            self.region.__enter__()  # type: ignore[no-untyped-call]
        here.depth += 1

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        here = self._here
        here.depth -= 1
        if here.depth or is_in_backward():
            return None
        self.region.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return whole(output)


class _Here(threading.local):
    """Where a thread stands: how many modules it is inside of."""

    depth = 0


def whole(output: Any) -> Any:
    """Return what a model gave with every DTensor in it gathered: who called it knows of no ranks."""
    with no_torch_function():
        return tree_map_only(Tensor, plain, output)
