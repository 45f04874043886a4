"""What each opcode of a pickle does to the machine; those that no checkpoint needs are not here."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_PROTOCOL: Final = 5
STOP: Final = ord(".")
_U1, _U2, _U4, _U8 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")


def _protocol(m: Machine) -> None:
    version = m.number(_U1)
    if version > _MAX_PROTOCOL:
        raise FormatError(f"has protocol {version}")


def _long(m: Machine, layout: struct.Struct) -> None:
    m.push(int.from_bytes(m.take(m.number(layout)), "little", signed=True))


def _text(m: Machine, layout: struct.Struct) -> None:
    m.push(m.take(m.number(layout)).decode("utf-8", "surrogatepass"))


def _bytes(m: Machine, layout: struct.Struct) -> None:
    m.push(m.take(m.number(layout)))


def _short_string(m: Machine) -> None:
    m.push(m.take(m.number(_U1)).decode("latin-1"))


def _append(m: Machine) -> None:
    value = m.pop()
    m.top(list).append(value)


def _appends(m: Machine) -> None:
    values = m.pop_mark()
    m.top(list).extend(values)


def _add_items(m: Machine) -> None:
    values = m.pop_mark()
    m.top(set).update(values)


def _set_item(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items([key, value])


def _dict(m: Machine) -> None:
    pairs = m.pop_mark()
    m.push_new({})
    m.set_items(pairs)


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    m.name(module, name)


def _global(m: Machine) -> None:
    module = m.line()
    m.name(module, m.line())


def _new_obj_ex(m: Machine) -> None:
    keywords, args = m.pop(), m.pop()
    if keywords:
        raise FormatError("an object is made with keywords, which no checkpoint needs")
    m.call(args)


OPERATIONS: Final[dict[int, Callable[[Machine], None]]] = {
    ord(code): operation
    for code, operation in {
        "\x80": _protocol,
        "\x95": lambda m: m.take(8) and None,  # a frame: only its length
        "(": Machine.mark,
        "0": lambda m: m.pop() and None,
        "1": lambda m: m.pop_mark() and None,
        "2": lambda m: m.push(m.stack[-1]),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number(_I4)),
        "K": lambda m: m.push(m.number(_U1)),
        "M": lambda m: m.push(m.number(_U2)),
        "\x8a": lambda m: _long(m, _U1),
        "\x8b": lambda m: _long(m, _U4),
        "G": lambda m: m.push(m.number(_F8)),
        "U": _short_string,
        "X": lambda m: _text(m, _U4),
        "\x8c": lambda m: _text(m, _U1),
        "\x8d": lambda m: _text(m, _U8),
        "B": lambda m: _bytes(m, _U4),
        "C": lambda m: _bytes(m, _U1),
        "\x8e": lambda m: _bytes(m, _U8),
        "\x96": lambda m: _bytes(m, _U8),
        "]": lambda m: m.push_new([]),
        ")": lambda m: m.push_new(()),
        "}": lambda m: m.push_new({}),
        "\x8f": lambda m: m.push_new(set()),
        "a": _append,
        "e": _appends,
        "\x90": _add_items,
        "s": _set_item,
        "u": lambda m: m.set_items(m.pop_mark()),
        "t": lambda m: m.push_new(tuple(m.pop_mark())),
        "\x85": lambda m: m.pop_tuple(1),
        "\x86": lambda m: m.pop_tuple(2),
        "\x87": lambda m: m.pop_tuple(3),
        "l": lambda m: m.push_new(m.pop_mark()),
        "d": _dict,
        "\x91": lambda m: m.push_new(frozenset(m.pop_mark())),
        "q": lambda m: m.put(m.number(_U1)),
        "r": lambda m: m.put(m.number(_U4)),
        "h": lambda m: m.get(m.number(_U1)),
        "j": lambda m: m.get(m.number(_U4)),
        "\x94": Machine.memoize,
        "c": _global,
        "\x93": _stack_global,
        "R": lambda m: m.call(m.pop()),
        "\x81": lambda m: m.call(m.pop()),
        "\x92": _new_obj_ex,
        "b": Machine.build,
        "Q": Machine.persistent,
    }.items()
}
