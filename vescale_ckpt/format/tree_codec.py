"""The bytes of a state tree: typed JSON, canonical, so that two trees are equal exactly if their bytes are.

Strings, None, booleans and integers below 2^53 stand for themselves. All else is a JSON array that starts with a tag:

    ["tensor"]                                   the place of an array
    ["dict", [keys], [nodes]]                    a fourth item lists what is special: "union", "ordered", "counter"
    ["list", [nodes]]  ["tuple", [nodes]]
    ["per_rank", [ranks], [nodes]]
    ["float", 16 hex digits]                     the IEEE bits, most significant first; so -0.0 and NaNs are exact
    ["complex", 32 hex digits]
    ["int", hex]                                 2^53 and beyond
    ["str", hex of its UTF-8]                    only with lone surrogates, which JSON cannot carry
    ["bytes", base64]
    ["library.type", text]                       a value of torch or numpy: ["torch.dtype", "bfloat16"]

There is no JSON object in it, so nothing depends on the order or the repetition of names.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.format.json_text import decode_json, encode_json
from vescale_ckpt.state.keys import MAX_INT_KEY, MIN_INT_KEY, check_key, is_unicode, place, type_name
from vescale_ckpt.state.tree import (
    MAX_DEPTH,
    DictKind,
    DictNode,
    Foreign,
    ListNode,
    Node,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
)
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_ckpt.state.tree import Path
    from vescale_storage.backend import Buffer

_TENSOR: Final = TensorNode()
_TENSOR_JSON: Final = ["tensor"]
_EXACT_INT: Final = 2**53
"""Integers from here on are written as hex: JSON readers of other languages keep them in doubles."""
_FOREIGN: Final = re.compile(r"[a-z][a-z0-9_]{0,31}(\.[A-Za-z0-9_]{1,32}){1,3}")
_HEX_INT: Final = re.compile(r"-?[1-9a-f][0-9a-f]*")
_LONE: Final = "surrogatepass"
MAX_RANK: Final = 2**31 - 1


def encode_tree(node: Node) -> bytes:
    """Return the canonical bytes of a tree.

    Raises:
        InvalidInputError: a tree that no reader would take: too deep, a key twice, a value that is none.
    """
    return encode_json(tree_to_json(node))


def decode_tree(data: Buffer) -> Node:
    """Return the tree of some bytes.

    Raises:
        FormatError: they are none of a tree.
    """
    return tree_from_json(decode_json(data, "the state tree", floats=False))


def tree_digest(node: Node) -> bytes:
    """Return the digest of a tree's canonical bytes: equal on two ranks exactly if their trees are."""
    return digest(encode_tree(node))


def tree_to_json(node: Node, path: Path = ()) -> Any:
    """Return the JSON form of a tree; ``path`` is where it stands, for messages.

    Raises:
        InvalidInputError: as ``encode_tree``.
    """
    match node:
        case TensorNode():
            return _TENSOR_JSON
        case ValueNode():
            return _value_to_json(node.value, path)
        case ListNode() | TupleNode():
            tag = "list" if isinstance(node, ListNode) else "tuple"
            return [tag, _nodes_to_json(enumerate(node.items), path)]
        case DictNode() | PerRankNode():
            return _keyed_to_json(node, path)


def _keyed_to_json(node: DictNode | PerRankNode, path: Path) -> list[Any]:
    keys = [key for key, _ in node.items]
    if len(set(keys)) != len(keys):
        raise InvalidInputError(f"cannot store {place(path)}: it has a key twice")
    nodes = _nodes_to_json(node.items, path)
    if isinstance(node, PerRankNode):
        if not all(_is_rank(rank) for rank in keys) or keys != sorted(keys):
            raise InvalidInputError(f"cannot store {place(path)}: {keys[:20]} are no ranks in ascending order")
        return ["per_rank", keys, nodes]
    for key in keys:
        if key.__class__ is not str or not key.isascii():
            check_key(key, path)
    special = [] if node.kind is DictKind.DICT else [node.kind.value]
    special += ["union"] if node.union else []
    return ["dict", keys, nodes, special] if special else ["dict", keys, nodes]


def tree_from_json(doc: Any, path: Path = ()) -> Node:
    """Return the tree of a JSON form.

    Raises:
        FormatError: as ``decode_tree``.
    """
    cls = doc.__class__
    if cls is not list:
        if (cls is int and not -_EXACT_INT < doc < _EXACT_INT) or cls is dict or cls is float:
            raise _wrong(path, "a bare number of 2^53 or more, a fraction or an object")
        return ValueNode(doc)
    tag = doc[0] if doc else None
    if tag.__class__ is str:
        read = _READERS.get(tag)
        if read:
            if len(path) >= MAX_DEPTH and tag not in _TEXTS:
                raise FormatError(f"cannot read the state tree: {place(path)[:200]} is nested over {MAX_DEPTH} deep")
            return read(doc, path)
        if len(doc) == 2 and doc[1].__class__ is str and _FOREIGN.fullmatch(tag):
            return ValueNode(Foreign(tag, doc[1]))
        if doc == _TENSOR_JSON:
            return _TENSOR
    named = repr(tag[:40]) if tag.__class__ is str else f"of type {type_name(tag)}"
    raise _wrong(path, f"a tag {named} with {len(doc) - 1} items")


def _nodes_to_json(items: Any, path: Path) -> list[Any]:
    if len(path) >= MAX_DEPTH:
        raise InvalidInputError(f"cannot store {place(path)[:200]}: it is nested over {MAX_DEPTH} deep: flatten it")
    return [
        _TENSOR_JSON if child.__class__ is TensorNode else tree_to_json(child, (*path, key)) for key, child in items
    ]


def _is_rank(rank: Any) -> bool:
    return rank.__class__ is int and 0 <= rank <= MAX_RANK


def _value_to_json(value: Any, path: Path) -> Any:
    write = _WRITERS.get(value.__class__)
    if write:
        return write(value)
    if not isinstance(value, Foreign) or not _FOREIGN.fullmatch(value.kind) or not is_unicode(value.text):
        raise InvalidInputError(
            f"cannot store {type_name(value)} at {place(path)}: it is no plain value; state.values.to_value makes them"
        )
    return [value.kind, value.text]


def _read_dict(doc: list[Any], path: Path) -> Node:
    kind, union = DictKind.DICT, False
    if len(doc) == 4:
        special = doc.pop()
        if special not in _SPECIALS:
            raise _wrong(path, "a dict with unknown marks")
        union = special[-1] == "union"
        kind = kind if special[0] == "union" else DictKind(special[0])
    items = _items(doc, path)
    for key, _ in items:
        if key.__class__ is not str and not MIN_INT_KEY <= key <= MAX_INT_KEY:
            raise _wrong(path, "a key of too many bits")
    return DictNode(items, union, kind)


def _read_per_rank(doc: list[Any], path: Path) -> Node:
    items = _items(doc, path)
    ranks = [rank for rank, _ in items]
    if not all(_is_rank(rank) for rank in ranks) or ranks != sorted(ranks):
        raise _wrong(path, "ranks that are none or not in ascending order")
    return PerRankNode(items)


def _items(doc: list[Any], path: Path) -> tuple[tuple[Any, Node], ...]:
    """Return the pairs of [tag, keys, nodes]; one tight loop, a manifest has a hundred thousand of them."""
    if len(doc) != 3 or doc[1].__class__ is not list or doc[2].__class__ is not list or len(doc[1]) != len(doc[2]):
        raise _wrong(path, f"a {doc[0]} whose keys and nodes do not pair up")
    items = []
    for key, child in zip(doc[1], doc[2], strict=True):
        if key.__class__ is not str and key.__class__ is not int:
            raise _wrong(path, f"a key of type {type_name(key)}")
        items.append((key, _TENSOR if child == _TENSOR_JSON else tree_from_json(child, (*path, key))))
    if len(items) > 1 and len(dict(items)) != len(items):
        raise _wrong(path, "a key twice")
    return tuple(items)


def _read_sequence(doc: list[Any], path: Path) -> Node:
    if len(doc) != 2 or doc[1].__class__ is not list:
        raise _wrong(path, f"a {doc[0]} without its items")
    nodes = tuple([tree_from_json(child, (*path, index)) for index, child in enumerate(doc[1])])
    return ListNode(nodes) if doc[0] == "list" else TupleNode(nodes)


def _read_text(doc: list[Any], path: Path) -> Node:
    tag = doc[0]
    if len(doc) != 2 or doc[1].__class__ is not str:
        raise _wrong(path, f"a {tag} without its text")
    text: str = doc[1]
    try:
        value = _TEXTS[tag](text)
    except (ValueError, struct.error) as error:
        raise _wrong(path, f"the {tag} {text[:40]!r}") from error
    if _value_to_json(value, path) != doc:  # one value has one form
        raise _wrong(path, f"the {tag} {text[:40]!r}, which is not written so")
    return ValueNode(value)


def _int(text: str) -> int:
    if not _HEX_INT.fullmatch(text):
        raise ValueError(text)
    return int(text, 16)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(text) from error


def _wrong(path: Path, found: str) -> FormatError:
    return FormatError(f"cannot read the state tree: at {place(path)[:200]} there is {found}")


def _write_str(value: str) -> Any:
    return value if is_unicode(value) else ["str", value.encode("utf-8", _LONE).hex()]


def _write_int(value: int) -> Any:
    return value if -_EXACT_INT < value < _EXACT_INT else ["int", f"{value:x}"]


_WRITERS: Final[dict[type, Callable[[Any], Any]]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: _write_str,
    int: _write_int,
    float: lambda value: ["float", struct.pack(">d", value).hex()],
    complex: lambda value: ["complex", struct.pack(">dd", value.real, value.imag).hex()],
    bytes: lambda value: ["bytes", base64.b64encode(value).decode()],
}
_TEXTS: Final[dict[str, Callable[[str], Any]]] = {
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "int": _int,
    "str": lambda text: bytes.fromhex(text).decode("utf-8", _LONE),
    "bytes": _bytes,
}
_READERS: Final[dict[str, Callable[[list[Any], Path], Node]]] = {
    "dict": _read_dict,
    "per_rank": _read_per_rank,
    "list": _read_sequence,
    "tuple": _read_sequence,
    **dict.fromkeys(_TEXTS, _read_text),
}
_SPECIALS: Final = (["union"], ["ordered"], ["counter"], ["ordered", "union"], ["counter", "union"])
