"""One fixed binary tree of additions over the units of a step, whoever holds them.

The tree over ``num_units`` units pairs neighbours, then neighbouring pairs, and carries an odd one up. A rank that
holds a contiguous range of units adds up the subtrees inside its range and no others, so that the additions made are
the same for every way to share the units out, and so are the bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from vescale_train.errors import InvalidInputError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

Node: TypeAlias = tuple[int, int]
"""A subtree: the half-open range of the units under it."""


def children(node: Node) -> tuple[Node, Node]:
    """Return the two subtrees of a node of at least two units; the left one is the larger power of two."""
    start, stop = node
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def nodes_of(units: range, num_units: int) -> tuple[Node, ...]:
    """Return the largest subtrees that lie inside a contiguous range of units, in order; at most ``2 log2(num_units)``.

    Raises:
        InvalidInputError: the range has gaps or is not within ``range(num_units)``.
    """
    if units.step != 1 or (len(units) and not 0 <= units.start < units.stop <= num_units):
        raise InvalidInputError(f"{units} is no contiguous range of units in range({num_units})")
    found: list[Node] = []
    open_nodes = [(0, num_units)] if len(units) else []
    while open_nodes:
        node = open_nodes.pop()
        if units.start <= node[0] and node[1] <= units.stop:
            found.append(node)
        elif node[0] < units.stop and units.start < node[1]:
            left, right = children(node)
            open_nodes += [right, left]
    return tuple(found)


def units_of(rank: int, num_ranks: int, num_units: int) -> range:
    """Return the contiguous units of a rank when all ranks share them as evenly as can be, the first ones more."""
    each, more = divmod(num_units, num_ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


class TreeSum:
    """Adds units as they come and keeps only what cannot be added yet: about ``log2`` of the units, not all of them."""

    def __init__(self, num_units: int) -> None:
        if num_units < 1:
            raise InvalidInputError(f"a sum needs at least one unit; num_units is {num_units}")
        self.num_units = num_units
        self._sums: dict[Node, torch.Tensor] = {}
        self._parents = _parents(num_units)

    def add(self, index: int, unit: torch.Tensor) -> None:
        """Add the unit of an index; its memory is taken over and may be written to.

        Raises:
            StateError: the unit was added before.
            InvalidInputError: there is no such unit.
        """
        if not 0 <= index < self.num_units:
            raise InvalidInputError(f"unit {index} is not one of the {self.num_units} of this sum")
        if any(start <= index < stop for start, stop in self._sums):
            raise StateError(f"unit {index} is in this sum already: every unit is added once")
        self.add_node((index, index + 1), unit)

    def add_node(self, node: Node, subtotal: torch.Tensor) -> None:
        """Add the sum of a whole subtree; its memory is taken over."""
        while node in self._parents:
            parent, left, right = self._parents[node]
            other = right if node == left else left
            if other not in self._sums:
                break
            found = self._sums.pop(other)
            first, second = (subtotal, found) if node == left else (found, subtotal)
            node, subtotal = parent, first.add_(second)
        self._sums[node] = subtotal

    def nodes(self) -> dict[Node, torch.Tensor]:
        """Return the subtrees added up so far, in order; they are not copied."""
        return dict(sorted(self._sums.items()))

    def total(self) -> torch.Tensor:
        """Return the sum of all units.

        Raises:
            StateError: units are missing; names what is there.
        """
        if set(self._sums) != {(0, self.num_units)}:
            raise StateError(f"the sum of {self.num_units} units has only those of {sorted(self._sums)}")
        return self._sums[0, self.num_units]


def tree_sum(units: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of equally shaped tensors in the fixed tree over their index; the tensors stay as they are."""
    adder = TreeSum(len(units))
    for index, unit in enumerate(units):
        adder.add(index, unit.clone())
    return adder.total()


def sum_nodes(nodes: Iterable[tuple[Node, torch.Tensor]], num_units: int) -> torch.Tensor:
    """Return the sum of all units from the subtrees that several ranks added up; the memory is taken over."""
    adder = TreeSum(num_units)
    for node, subtotal in nodes:
        adder.add_node(node, subtotal)
    return adder.total()


def _parents(num_units: int) -> dict[Node, tuple[Node, Node, Node]]:
    """Return, for every node below the root, its parent and both children of that."""
    found: dict[Node, tuple[Node, Node, Node]] = {}
    open_nodes = [(0, num_units)]
    while open_nodes:
        node = open_nodes.pop()
        if node[1] - node[0] > 1:
            left, right = children(node)
            found[left] = found[right] = (node, left, right)
            open_nodes += [left, right]
    return found
