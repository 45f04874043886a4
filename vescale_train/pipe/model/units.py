"""The units of a model: the modules, in order, that a pipeline may put on different ranks.

Found from the module tree alone: blocks are the items of lists (``ModuleList``, ``Sequential``), and what stands
beside a list on the way to it (embeddings, norms, heads) is a unit as a whole. The model's own ``forward`` is not
looked at here; the flow of values between units is measured when it first runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from vescale_train.pipe.errors import SplitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model, by name, in the order in which they are defined."""

    names: tuple[str, ...]
    blocks: range
    """From the first item of a ``ModuleList`` to the last one; without any, of a ``Sequential``; or else all units."""
    glue: tuple[str, ...]
    """Parameters that no unit owns: the model's own, used between units."""


def find_units(model: nn.Module, keep_whole: Sequence[str] = ()) -> Units:
    """Return the units of a model.

    Args:
        model: any module; nothing is run.
        keep_whole: regular expressions; a module whose whole name matches is one unit.

    Raises:
        SplitError: a pattern matches no module, or the model has fewer than one unit.
    """
    patterns = [re.compile(pattern) for pattern in keep_whole]
    names_all = [name for name, _ in model.named_modules()]
    unmatched = [p.pattern for p in patterns if not any(p.fullmatch(name) for name in names_all)]
    if unmatched:
        raise SplitError(f"cannot keep {', '.join(unmatched)} whole: no module of the model has such a name")
    seen: set[int] = set()
    found: list[tuple[str, int]] = []
    for name, parent in _walk(model, "", patterns):
        module = model.get_submodule(name)
        if id(module) not in seen:
            seen.add(id(module))
            found.append((name, parent))
    if not found:
        raise SplitError(f"cannot split {type(model).__name__}: it has no modules inside")
    names = tuple(name for name, _ in found)
    inside = {id(p) for name in names for p in model.get_submodule(name).parameters()}
    glue = tuple(name for name, p in model.named_parameters() if id(p) not in inside)
    return Units(names, _blocks([parent for _, parent in found]), glue)


def is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks."""
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module is ever called, and not only a place to keep others in."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _walk(module: nn.Module, name: str, patterns: Sequence[re.Pattern[str]]) -> Iterator[tuple[str, int]]:
    """Give each unit, and 2 if it is an item of a ModuleList, 1 of a Sequential, 0 of neither."""
    for key, child in module.named_children():
        child_name = f"{name}.{key}" if name else key
        whole = any(pattern.fullmatch(child_name) for pattern in patterns)
        item_with_forward = is_list(module) and has_own_forward(child)
        if whole or item_with_forward or not _leads_to_a_list(child):
            yield child_name, 2 if isinstance(module, nn.ModuleList) else int(is_list(module))
        else:
            yield from _walk(child, child_name, patterns)


def _leads_to_a_list(module: nn.Module) -> bool:
    if is_list(module) or not has_own_forward(module):
        return True
    return any(not isinstance(child, nn.Sequential) and _leads_to_a_list(child) for child in module.children())


def _blocks(kinds: Sequence[int]) -> range:
    places = [place for place, kind in enumerate(kinds) if kind == max(kinds)]
    return range(places[0], places[-1] + 1) if len(places) > 1 else range(len(kinds))
