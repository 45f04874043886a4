"""What the ranks hold, merged into one tree, or every disagreement between them in one error.

Nothing is picked in silence: where ranks must agree and do not, the error names the path, the ranks on each side and
what each side has. Pure, so that a save on a thousand ranks is a loop in a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vescale_ckpt.errors import InvalidInputError, MismatchError
from vescale_ckpt.state.keys import place
from vescale_ckpt.state.tree import (
    MAX_DEPTH,
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    children,
    describe,
    fqn,
    same_value,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PerRankEntries: TypeAlias = tuple[tuple[Path, Node], ...]
"""(path of a ``PerRankNode``, what one rank has there)."""

_MAX_LINES: Final = 50
"""Problems in the text of an error; all of them are in its ``problems``."""
_MAX_KEYS: Final = 6
_MAX_SIDES: Final = 8


def merge_trees(trees: Sequence[tuple[int, Node]]) -> Node:
    """Return the one tree of all ranks' trees, given as (rank, tree).

    Per-rank nodes are united by rank. A dict with ``union`` gets every key that any rank has, in the order in which
    they first appear. Everywhere else keys, lengths, types and values must be the same on all ranks; the order of keys
    need not be, and the first rank's stands. A tree that several ranks share as one object is looked at once.

    Raises:
        MismatchError: the ranks disagree; ``problems`` has one line for each place.
        InvalidInputError: no trees, a rank twice, or a tree deeper than ``MAX_DEPTH``.
    """
    groups: dict[int, tuple[list[int], Node]] = {}
    for rank, tree in trees:
        groups.setdefault(id(tree), ([], tree))[0].append(rank)
    ranks = [rank for members, _ in groups.values() for rank in members]
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidInputError(f"cannot merge the trees of ranks {sorted(ranks)}: need one tree of every rank")
    merger = _Merger()
    merged = merger.merge((), [tuple(members) for members, _ in groups.values()], [tree for _, tree in groups.values()])
    if merger.problems:
        what = f"{len(ranks)} ranks disagree on state that must be the same (or be declared per rank)"
        raise mismatch(what, merger.problems)
    return merged


def mismatch(what: str, problems: Sequence[str]) -> MismatchError:
    """Return the error for a list of problems: all in its context, the first of them in its text."""
    lines = [f"{what}; {len(problems)} problem{'s' if len(problems) > 1 else ''}:", *problems[:_MAX_LINES]]
    if len(problems) > _MAX_LINES:
        lines.append(f"... and {len(problems) - _MAX_LINES} more (see .problems)")
    return MismatchError("\n  ".join(lines), problems=tuple(problems))


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks for people: ``rank 3``, ``ranks 0-3, 7``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def split_per_rank(tree: Node) -> tuple[Node, PerRankEntries]:
    """Return the tree with every per-rank node emptied, and what stood in them, for a tree of one rank.

    What is left is the same on ranks that differ in their per-rank values only, so its digest can be compared.

    Raises:
        InvalidInputError: a per-rank node holds the entries of several ranks.
    """
    entries: list[tuple[Path, Node]] = []

    def empty(path: Path, node: Node) -> Node:
        if not isinstance(node, PerRankNode):
            return _rebuild(node, path, empty)
        if len(node.items) > 1:
            raise InvalidInputError(
                f"cannot split {fqn(path)!r}: it holds the entries of {format_ranks(rank for rank, _ in node.items)}, "
                "a tree of one rank holds one",
                fqn=fqn(path),
            )
        entries.extend((path, child) for _, child in node.items)
        return PerRankNode(())

    return empty((), tree), tuple(entries)


def fill_per_rank(tree: Node, entries: Iterable[tuple[int, PerRankEntries]]) -> Node:
    """Return the tree with what ``split_per_rank`` took out put back, given as (rank, entries) of every rank.

    Raises:
        MismatchError: an entry has no per-rank node at its path, or a rank has two entries for one.
    """
    wanted: dict[Path, dict[int, Node]] = {}
    problems: list[str] = []
    for rank, of_rank in entries:
        for path, node in of_rank:
            if wanted.setdefault(path, {}).setdefault(rank, node) is not node:
                problems.append(f"{place(path)}: two entries of rank {rank}")
    if not wanted:
        return tree

    def fill(path: Path, node: Node) -> Node:
        if not isinstance(node, PerRankNode):
            return _rebuild(node, path, fill)
        found = wanted.pop(path, {})
        twice = [rank for rank, _ in node.items if rank in found]
        if twice:
            problems.append(f"{place(path)}: two entries of {format_ranks(twice)}")
        return PerRankNode(tuple(sorted([*node.items, *found.items()], key=lambda item: item[0])))

    filled = fill((), tree)
    problems += [
        f"{place(path)}: a value of {format_ranks(of)} alone, for which the tree has no place"
        for path, of in wanted.items()
    ]
    if problems:
        raise mismatch("per-rank values do not fit the tree", problems)
    return filled


class _Merger:
    """One merge: a walk down all trees side by side that collects what disagrees."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def merge(self, path: Path, ranks: list[tuple[int, ...]], nodes: list[Node]) -> Node:
        """Return the merged node; ``nodes[i]`` is what the ranks ``ranks[i]`` hold."""
        first = nodes[0]
        cls = first.__class__
        same = True
        for node in nodes:
            if node is not first:
                same = False
                if node.__class__ is not cls:
                    self._disagree(path, ranks, [describe(node) for node in nodes])
                    return first
        if same or cls is TensorNode:
            return first
        if cls is not ValueNode:
            _check_depth(path)
        return self._inside(path, ranks, nodes)

    def _inside(self, path: Path, ranks: list[tuple[int, ...]], nodes: list[Any]) -> Node:
        """Merge nodes of one class."""
        match nodes[0]:
            case DictNode():
                return self._dict(path, ranks, nodes)
            case ListNode() | TupleNode():
                return self._sequence(path, ranks, nodes)
            case PerRankNode():
                return self._per_rank(path, ranks, nodes)
            case _:
                return self._value(path, ranks, nodes)

    def _value(self, path: Path, ranks: list[tuple[int, ...]], nodes: list[ValueNode]) -> Node:
        value = nodes[0].value
        for node in nodes:
            if not same_value(node.value, value):
                distinct = list(dict.fromkeys(nodes))
                texts = dict(zip(distinct, _distinct_texts([node.value for node in distinct]), strict=True))
                self._disagree(path, ranks, [texts[node] for node in nodes])
                break
        return nodes[0]

    def _sequence(self, path: Path, ranks: list[tuple[int, ...]], nodes: list[ListNode] | list[TupleNode]) -> Node:
        first = nodes[0]
        length = len(first.items)
        if any(len(node.items) != length for node in nodes):
            self._disagree(path, ranks, [describe(node) for node in nodes])
            return first
        merged = [
            self.merge((*path, index), ranks, list(column))
            for index, column in enumerate(zip(*[node.items for node in nodes], strict=True))
        ]
        return _with_items(first, merged)

    def _dict(self, path: Path, ranks: list[tuple[int, ...]], nodes: list[DictNode]) -> Node:
        first = nodes[0]
        if any(node.union is not first.union or node.kind is not first.kind for node in nodes):
            kinds = [f"a dict of kind {node.kind}{' with keys of its own' if node.union else ''}" for node in nodes]
            self._disagree(path, ranks, kinds)
            return first
        keys = [key for key, _ in first.items]
        if all([key for key, _ in node.items] == keys for node in nodes):
            columns = zip(*[node.items for node in nodes], strict=True)
            merged = [self.merge((*path, column[0][0]), ranks, [child for _, child in column]) for column in columns]
            return _with_items(first, merged)
        return self._dict_byplace(path, ranks, nodes)

    def _dict_byplace(self, path: Path, ranks: list[tuple[int, ...]], nodes: list[DictNode]) -> Node:
        holders: dict[Key, list[int]] = {}
        tables = [dict(node.items) for node in nodes]
        for index, table in enumerate(tables):
            for key in table:
                holders.setdefault(key, []).append(index)
        if not nodes[0].union:
            self._missing_keys(path, ranks, holders)
        items = []
        for key, held in holders.items():
            child = self.merge((*path, key), [ranks[i] for i in held], [tables[i][key] for i in held])
            items.append((key, child))
        return DictNode(tuple(items), nodes[0].union, nodes[0].kind)

    def _missing_keys(self, path: Path, ranks: list[tuple[int, ...]], holders: dict[Key, list[int]]) -> None:
        by_holders: dict[tuple[int, ...], list[Key]] = {}
        for key, held in holders.items():
            if len(held) < len(ranks):
                by_holders.setdefault(tuple(held), []).append(key)
        for held_by, keys in by_holders.items():
            shown = ", ".join(shorten(key) for key in keys[:_MAX_KEYS])
            more = f", ... ({len(keys)} keys)" if len(keys) > _MAX_KEYS else ""
            have = format_ranks(rank for i in held_by for rank in ranks[i])
            lack = format_ranks(rank for i in set(range(len(ranks))).difference(held_by) for rank in ranks[i])
            self.problems.append(f"{place(path)}: {shown}{more} only on {have}, not on {lack}")

    def _per_rank(self, path: Path, ranks: list[tuple[int, ...]], nodes: list[PerRankNode]) -> Node:
        united: dict[int, Node] = {}
        given_by: dict[int, tuple[int, ...]] = {}
        for members, node in zip(ranks, nodes, strict=True):
            for rank, child in node.items:
                if rank not in united:
                    united[rank], given_by[rank] = child, members
                elif united[rank] != child:
                    self.problems.append(
                        f"{place((*path, rank))}: {format_ranks(given_by[rank])} and {format_ranks(members)} have "
                        f"different values for rank {rank}"
                    )
        return PerRankNode(tuple(sorted(united.items())))

    def _disagree(self, path: Path, ranks: list[tuple[int, ...]], texts: Sequence[str]) -> None:
        sides: dict[str, list[int]] = {}
        for members, text in zip(ranks, texts, strict=True):
            sides.setdefault(text, []).extend(members)
        parts = [f"{format_ranks(members)}: {text}" for text, members in list(sides.items())[:_MAX_SIDES]]
        if len(sides) > _MAX_SIDES:
            parts.append(f"... ({len(sides)} different ones)")
        self.problems.append(f"{place(path)}: {'; '.join(parts)}")


def _distinct_texts(values: Sequence[object]) -> list[str]:
    """Return a short text for each of some different values, no two of them alike."""
    texts: list[str] = []
    seen: dict[str, object] = {}
    for value in values:
        text = shorten(value)
        if text in seen:
            text = f"{text} (differs {_first_difference(seen[text], value)})"
        else:
            seen[text] = value
        texts.append(text if text not in texts else f"{text} (another, number {len(texts) + 1})")
    return texts


def _first_difference(a: object, b: object) -> str:
    if isinstance(a, str | bytes) and isinstance(b, str | bytes):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return f"from position {at} on: {b[at : at + 20]!r}"
    return "where the text is cut"


def _with_items(node: DictNode | ListNode | TupleNode, merged: list[Node]) -> Node:
    """Return a container with other children, or the very same one if none has changed."""
    if isinstance(node, DictNode):
        if all([new is old for new, (_, old) in zip(merged, node.items, strict=True)]):  # noqa: C419 - faster
            return node
        items = tuple([(key, new) for new, (key, _) in zip(merged, node.items, strict=True)])
        return DictNode(items, node.union, node.kind)
    if all([new is old for new, old in zip(merged, node.items, strict=True)]):  # noqa: C419 - faster
        return node
    return type(node)(tuple(merged))


def _rebuild(node: Node, path: Path, visit: Callable[[Path, Node], Node]) -> Node:
    """Return a node with its children as ``visit`` returns them."""
    if isinstance(node, DictNode | ListNode | TupleNode):
        _check_depth(path)
        return _with_items(node, [visit((*path, key), child) for key, child in children(node)])
    return node


def _check_depth(path: Path) -> None:
    if len(path) >= MAX_DEPTH:
        raise InvalidInputError(f"the state at {fqn(path)[:200]!r} is nested more than {MAX_DEPTH} deep: flatten it")
