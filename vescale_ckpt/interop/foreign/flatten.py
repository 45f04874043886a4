"""Nested states as named leaves: the tensors, and the plain values beside them.

A pickle of a few bytes can hold the same list a billion times over, or a list that holds itself. So every step is
counted, and more steps than the pickle has bytes end the walk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.pickles import Named, Record
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vescale_ckpt.state.tree import Key

MAX_DEPTH: Final = 64
MIN_STEPS: Final = 1_000_000


@dataclass(slots=True)
class Flat:
    """The leaves of a state."""

    tensors: dict[str, tuple[tuple[Key, ...], Any]] = field(default_factory=dict)
    """Dotted name -> (path, tensor)."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted name -> plain value."""
    value_paths: dict[str, tuple[Key, ...]] = field(default_factory=dict)
    """Dotted name -> path of a plain value."""


def flatten(state: Any, is_tensor: Callable[[Any], bool], what: str, num_bytes: int = 0) -> Flat:
    """Return the leaves of a nested state; a list without tensors is one value, as torch's own checkpoints have it.

    Two leaves whose dotted names are the same keep both: the second under the text of its path.

    Args:
        state: dicts, lists, tuples, records, and anything else as leaves.
        is_tensor: tells tensors.
        what: the file, for messages.
        num_bytes: what the state was read from has so many bytes.

    Raises:
        FormatError: the state is nested too deeply, or loops, or is larger than what it was read from.
    """
    walk = _Walk(is_tensor, what, max(MIN_STEPS, num_bytes))
    flat = Flat()
    for path, leaf in walk.leaves(state):
        name = fqn(path) or "value"
        if name in flat.tensors or name in flat.values:
            name = repr(path)
        if is_tensor(leaf):
            flat.tensors[name] = (path, leaf)
        else:
            flat.values[name] = walk.plain(leaf)
            flat.value_paths[name] = path
    return flat


def plain(value: Any, what: str, num_bytes: int = 0) -> Any:
    """Return a value without records and names of classes: records as dicts of their fields.

    Raises:
        FormatError: as for ``flatten``.
    """
    return _Walk(lambda _: False, what, max(MIN_STEPS, num_bytes)).plain(value)


class _Walk:
    def __init__(self, is_tensor: Callable[[Any], bool], what: str, steps: int) -> None:
        self._is_tensor = is_tensor
        self._what = what
        self._steps_left = steps
        self._known: dict[int, bool] = {}
        """Containers, by identity, that hold a tensor or none."""

    def _step(self, depth: int, count: int = 1) -> None:
        self._steps_left -= count
        if depth > MAX_DEPTH or self._steps_left < 0:
            raise FormatError(f"cannot read {self._what}: it is nested without end, or larger than its bytes can tell")

    def leaves(self, state: Any) -> Iterator[tuple[tuple[Key, ...], Any]]:
        """Yield (path, leaf) in order."""
        stack: list[tuple[tuple[Key, ...], Any]] = [((), state)]
        while stack:
            path, found = stack.pop()
            node = _fields(found) if isinstance(found, Record) else found
            if isinstance(node, dict) and node:
                self._step(len(path), len(node))
                stack += [((*path, _key(key)), child) for key, child in reversed(node.items())]
            elif isinstance(node, list | tuple) and self._holds(node, len(path)):
                self._step(len(path), len(node))
                stack += [((*path, index), node[index]) for index in reversed(range(len(node)))]
            else:
                yield path, node

    def _holds(self, node: Any, depth: int) -> bool:
        """Return whether there is a tensor in a container."""
        if self._is_tensor(node):
            return True
        if not isinstance(node, dict | list | tuple):
            return False
        if id(node) not in self._known:
            self._step(depth, len(node))
            self._known[id(node)] = False  # for one that holds itself
            children = node.values() if isinstance(node, dict) else node
            self._known[id(node)] = any(self._holds(child, depth + 1) for child in children)
        return self._known[id(node)]

    def plain(self, value: Any, depth: int = 0) -> Any:
        """Return a value without records."""
        self._step(depth)
        if isinstance(value, Record):
            return self.plain(_fields(value), depth + 1)
        if isinstance(value, Named):
            return value.full
        if isinstance(value, dict):
            return {_key(key): self.plain(child, depth + 1) for key, child in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "numel"):  # torch.Size stays what it is
            made = [self.plain(child, depth + 1) for child in value]
            return tuple(made) if isinstance(value, tuple) else made
        return value


def _fields(record: Record) -> Any:
    return record.state or (record.raw_state if record.raw_state is not None else list(record.args))


def _key(key: Any) -> Key:
    return key if isinstance(key, str | int) and not isinstance(key, bool) else str(key)[:1000]
