"""Parameter groups: as stored, and which of them each group of an optimizer is, told by the names in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.adapters.names import names_in
from vescale_ckpt.state.tree import DictNode, Key, Node, ValueNode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

KEYS_LEFT_OUT: Final = frozenset({"params", "param_names"})
"""Of a parameter group: ``params`` is stored as global names, which say what ``param_names`` would."""

_DEVICE_SWITCHES: Final = frozenset({"capturable", "fused"})


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A parameter group in a snapshot."""

    index: int
    names: tuple[str, ...]
    options: Mapping[Key, Node]
    left_out: Mapping[Key, Node]
    """What is not set as an option: the names themselves."""

    @property
    def steps_on_device(self) -> bool:
        """Whether torch keeps the step count where the parameter is, and not on the host."""
        return any(bool(plain_option(node)) for key, node in self.options.items() if key in _DEVICE_SWITCHES)


@dataclass(frozen=True, slots=True)
class Matching:
    """Which stored group each group of the target is; None where that is a problem."""

    groups: tuple[StoredGroup | None, ...]
    problems: tuple[tuple[int, str], ...]
    """(index of the group in the target, what is wrong with it)."""


def parse_group(index: int, node: Node) -> StoredGroup | None:
    """Return a stored parameter group, None if its parameters have no names."""
    items: dict[Key, Node] = dict(node.items) if isinstance(node, DictNode) else {}
    names = names_in(items.get("params"))
    if names is None:
        return None
    left_out: dict[Key, Node] = {key: items.pop(key) for key in KEYS_LEFT_OUT if key in items}
    return StoredGroup(index, names, items, left_out)


def match_groups(stored: Sequence[StoredGroup], target: Sequence[Sequence[str] | None]) -> Matching:
    """Return the stored group of each group of the target, given as the stored names of its parameters.

    None instead of names is a group that is left out.

    A group may hold a part of the stored one, as it does on a pipeline stage, but no two. An empty group is the stored
    one at its place if that is free, which keeps groups apart that are empty on this stage only; else the next empty
    one.
    """
    owner = {name: group.index for group in stored for name in group.names}
    matches: list[StoredGroup | None] = [None] * len(target)
    problems: list[tuple[int, str]] = []
    used: dict[int, int] = {}
    for index, names in enumerate(target):
        found = {owner[name]: name for name in reversed(names or ())}
        if len(found) > 1:
            shown = ", ".join(f"{g} (with '{name}')" for g, name in sorted(found.items()))
            problems.append((index, f"the target has in one group what the snapshot has in groups {shown}"))
        elif found:
            (group,) = found
            if group in used:
                both = f"{used[group]} and {index}"
                problems.append((index, f"the target has in groups {both} what the snapshot has in its group {group}"))
            else:
                used[group] = index
                matches[index] = stored[group]
    for index in (index for index, names in enumerate(target) if names is not None and not names):
        free = [group for group in stored if group.index not in used]
        at_place = [g for g in free if g.index == index and (not g.names or len(stored) == len(target))]
        match = next(iter([*at_place, *(g for g in free if not g.names)]), None)
        if match is None:
            problems.append((index, f"the target has an empty group, the snapshot has {len(stored)} and none for it"))
        else:
            used[match.index] = index
            matches[index] = match
    return Matching(tuple(matches), tuple(problems))


def plain_option(node: Node) -> Any:
    """Return the value of an option, None if it is a tensor or a container."""
    return node.value if isinstance(node, ValueNode) else None


def is_switched(group: StoredGroup, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether saved options turn something on or off that the target's do not: state then differs rightly."""
    kinds = (bool, type(None))
    targets: list[dict[Any, Any]] = optimizer.param_groups
    for key, node in group.options.items():
        stored = plain_option(node)
        for target in targets:
            is_switch = key == "momentum" or isinstance(stored, kinds) or isinstance(target.get(key), kinds)
            if is_switch and isinstance(node, ValueNode) and bool(stored) != bool(target.get(key)):
                return True
    return False
