"""From a user's nested state to a tree of nodes and back: the walk that every adapter shares.

Containers are dict (also OrderedDict, Counter and defaultdict), list and tuple; everything else is a leaf that the
caller's function knows, or a plain value of ``state.values``. What can be neither is refused, all of it in one error.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.keys import check_key
from vescale_ckpt.state.tree import (
    MAX_DEPTH,
    DictKind,
    DictNode,
    ListNode,
    Node,
    Path,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    fqn,
)
from vescale_ckpt.state.values import from_value, to_value

if TYPE_CHECKING:
    from collections.abc import Callable

_DICT_KINDS: Final[dict[type, DictKind]] = {
    dict: DictKind.DICT,
    OrderedDict: DictKind.ORDERED,
    Counter: DictKind.COUNTER,
    defaultdict: DictKind.DICT,  # its factory is code, so it comes back as a plain dict; the caller is told
}
_MAKE_DICT: Final[dict[DictKind, type[dict[Any, Any]]]] = {
    DictKind.DICT: dict,
    DictKind.ORDERED: OrderedDict,
    DictKind.COUNTER: Counter,
}


def build_tree(
    state: Any,
    leaf: Callable[[Path, Any], Node | None],
    path: Path = (),
    *,
    notes: list[str] | None = None,
) -> Node:
    """Return the tree of a state.

    ``leaf(path, object)`` is asked first about every object, containers too, and returns the node to put there, or
    None if the object is nothing special. ``notes`` collects what will come back as something else, one line each.

    Raises:
        InvalidInputError: what no tree can hold: other objects, other keys, circles, too much depth. ``problems`` in
            its context lists all of them.
    """
    builder = _Builder(leaf, notes)
    node = builder.build(state, path)
    if builder.problems:
        raise InvalidInputError("\n".join(builder.problems), problems=tuple(builder.problems))
    return node


def restore_tree(
    node: Node,
    tensor: Callable[[Path], Any],
    per_rank: Callable[[Path, PerRankNode], Any],
    path: Path = (),
) -> Any:
    """Return the state that a tree describes, with what ``tensor`` and ``per_rank`` return in their places.

    Raises:
        FormatError: a value of torch or numpy that the installed version does not know.
    """
    match node:
        case TensorNode():
            return tensor(path)
        case ValueNode():
            return from_value(node.value)
        case PerRankNode():
            return per_rank(path, node)
        case DictNode():
            items = {key: restore_tree(child, tensor, per_rank, (*path, key)) for key, child in node.items}
            return items if node.kind is DictKind.DICT else _MAKE_DICT[node.kind](items)
        case ListNode() | TupleNode():
            values = [restore_tree(child, tensor, per_rank, (*path, i)) for i, child in enumerate(node.items)]
            return values if isinstance(node, ListNode) else tuple(values)


class _Builder:
    """One walk over a state: what was wrong so far and which containers stand above."""

    def __init__(self, leaf: Callable[[Path, Any], Node | None], notes: list[str] | None) -> None:
        self.leaf = leaf
        self.notes = notes
        self.problems: list[str] = []
        self.above: dict[int, Path] = {}
        """id of every container that is being walked -> its path."""

    def build(self, obj: Any, path: Path) -> Node:
        node = self.leaf(path, obj)
        if node is not None:
            return node
        cls = obj.__class__
        if cls is list or cls is tuple or cls in _DICT_KINDS:
            return self._container(obj, path)
        try:
            return ValueNode(to_value(obj, path))
        except InvalidInputError as error:
            self.problems.append(error.message)
            return ValueNode(None)

    def _container(self, obj: Any, path: Path) -> Node:
        if id(obj) in self.above:
            self.problems.append(
                f"cannot store the state: {fqn(path)!r} is {fqn(self.above[id(obj)])!r}, which holds it"
            )
            return ValueNode(None)
        if len(path) >= MAX_DEPTH:
            self.problems.append(f"cannot store the state: {fqn(path)[:200]!r} is nested more than {MAX_DEPTH} deep")
            return ValueNode(None)
        self.above[id(obj)] = path
        try:
            if isinstance(obj, dict):
                return self._dict(obj, path)
            items = tuple([self.build(child, (*path, i)) for i, child in enumerate(obj)])
            return ListNode(items) if isinstance(obj, list) else TupleNode(items)
        finally:
            del self.above[id(obj)]

    def _dict(self, obj: dict[Any, Any], path: Path) -> DictNode:
        items = []
        for key, child in obj.items():
            try:
                items.append((key, self.build(child, (*path, check_key(key, path)))))
            except InvalidInputError as error:
                self.problems.append(error.message)
        if self.notes is not None and isinstance(obj, defaultdict):
            self.notes.append(f"{fqn(path)!r} is a defaultdict and will come back as a dict")
        return DictNode(tuple(items), kind=_DICT_KINDS[type(obj)])
