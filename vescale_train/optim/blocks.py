"""Blocks: the modules of a model that are sharded, or computed again in backward, each as one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from vescale_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def blocks_of(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in its order.

    Args:
        model: any.
        patterns: regular expressions that match whole names of modules; None takes the members of every outermost
            ``ModuleList``, which is where the layers of a transformer stand.

    Raises:
        ConfigError: a pattern matches no module, or a block lies inside another.
    """
    if patterns is None:
        return _in_lists(model)
    compiled = [re.compile(pattern) for pattern in patterns]
    found = {name: m for name, m in model.named_modules() if name and any(p.fullmatch(name) for p in compiled)}
    idle = [p.pattern for p in compiled if not any(p.fullmatch(name) for name in found)]
    if idle:
        raise ConfigError(f"cannot find blocks: {idle} match no module of {type(model).__name__}")
    inside = [name for name in found if any(name.startswith(f"{other}.") for other in found)]
    if inside:
        raise ConfigError(f"cannot take {inside} as blocks: each lies inside another one; make the patterns narrower")
    return found


def _in_lists(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{other}.") for other in lists):
            lists.append(name)
            found |= {f"{name}.{index}": member for index, member in enumerate(module)}
    return found
