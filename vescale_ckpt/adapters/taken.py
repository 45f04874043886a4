"""Taken: which leaves of a stored tree some target has a place for, and what to say of the rest.

A rank under pipeline parallelism has a place for a part of the snapshot only. What no rank takes is unexpected, and
that only all ranks together can tell: so it is a row of flags that ranks can unite, in the order of the stored tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.state.tree import DictNode, Node, Path, TensorNode, ValueNode, children, fqn, walk

if TYPE_CHECKING:
    import numpy.typing as npt

    from vescale_ckpt.adapters.options import Selector


class Taken:
    """Flags of the leaves (tensors and plain values) of one stored tree."""

    def __init__(self, stored: Node) -> None:
        leaves = (path for path, node in walk(stored) if isinstance(node, TensorNode | ValueNode))
        self._index = {path: index for index, path in enumerate(leaves)}
        self.flags: npt.NDArray[np.bool_] = np.zeros(len(self._index), dtype=np.bool_)

    def add(self, path: Path) -> None:
        """Take one leaf."""
        self.flags[self._index[path]] = True

    def add_below(self, path: Path, node: Node) -> None:
        """Take everything from this node down."""
        for below, child in walk(node, path):
            if isinstance(child, TensorNode | ValueNode):
                self.add(below)


def unexpected(stored: Node, flags: npt.NDArray[np.bool_], selector: Selector) -> tuple[str, ...]:
    """Return one line for each part of a stored tree that nothing takes and no option allows.

    ``flags`` is ``Restore.taken``, united over the ranks that load together.
    """
    return tuple(_Report(flags, selector).lines(stored))


class _Report:
    def __init__(self, flags: npt.NDArray[np.bool_], selector: Selector) -> None:
        self._flags = flags
        self._selector = selector
        self._next = 0
        self._optimizers: set[Path] = set()

    def lines(self, stored: Node) -> list[str]:
        return self._say((), stored, *self._visit(stored, ()))

    def _visit(self, node: Node, path: Path) -> tuple[tuple[int, int], list[str] | None]:
        """Return ((tensors, values) left over below, lines); lines None: nothing below is taken, say it in one line."""
        if isinstance(node, TensorNode | ValueNode):
            index, self._next = self._next, self._next + 1
            if self._flags[index] or not self._selector.takes(fqn(path)):
                return (0, 0), []
            return ((1, 0) if isinstance(node, TensorNode) else (0, 1)), None
        if isinstance(node, DictNode) and {"state", "param_groups"} <= {key for key, _ in node.items}:
            self._optimizers.add(path)
        total, whole = (0, 0), True
        parts: list[tuple[Path, Node, tuple[int, int], list[str] | None]] = []
        for key, child in children(node):
            counts, lines = self._visit(child, (*path, key))
            parts.append(((*path, key), child, counts, lines))
            total = (total[0] + counts[0], total[1] + counts[1])
            whole = whole and lines is None
        if whole and path:
            return total, None
        return total, [line for part in parts for line in self._say(*part)]

    def _say(self, path: Path, node: Node, counts: tuple[int, int], lines: list[str] | None) -> list[str]:
        if lines is None and any(counts):
            return [self._line(path, node, counts)]
        return lines or []

    def _line(self, path: Path, node: Node, counts: tuple[int, int]) -> str:
        name = fqn(path)
        if isinstance(node, TensorNode):
            what = "a tensor"
        elif isinstance(node, ValueNode):
            what = "a value"
        else:
            what = " and ".join(
                f"{n} {kind}{'s' * (n != 1)}" for n, kind in zip(counts, ("tensor", "value"), strict=True) if n
            )
        return f"unexpected '{name}': the snapshot has {what} that the target has no place for; {self._way_out(path)}"

    def _way_out(self, path: Path) -> str:
        allow = f"or allow it with ignore=({fqn(path)!r},)"
        if any(path[:end] in self._optimizers for end in range(len(path))):
            # moments have no place in a state_dict() made before the first step, nor without their parameter
            return f"pass the optimizer itself, with this parameter, and not its state_dict(), {allow}"
        return f"add it to the target, {allow}"
