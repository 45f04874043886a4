"""Activation checkpointing: blocks keep their inputs only, and compute the rest again in backward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_train.optim.blocks import blocks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_Model = TypeVar("_Model", bound=nn.Module)


def recompute_activations(model: _Model, blocks: Sequence[str] | None = None, *, every: int = 1) -> _Model:
    """Make every n-th block of a model compute its activations again in backward; gradients keep their bits.

    Modules stay what they are and parameters keep their names: only ``forward`` of each block is wrapped.

    Args:
        model: changed in place.
        blocks: see ``blocks_of``.
        every: 1 for all blocks, 2 for every other one.

    Returns:
        The same object.

    Raises:
        ConfigError: a pattern matches no module.
    """
    for module in list(blocks_of(model, blocks).values())[::every]:
        forward: Any = functools.partial(checkpoint, module.forward, use_reentrant=False)
        module.forward = forward
    return model
