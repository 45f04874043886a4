"""The machine that reads pickles as data: a stack, a memo, and a closed list of names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vescale_ckpt.errors import FormatError

if TYPE_CHECKING:
    import struct
    from collections.abc import Callable, Mapping

_SCALARS: Final = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that a pickle names; never imported."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """An object of an allowed class, as data: what its maker was given and what state was put into it."""

    cls: Named
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    raw_state: Any = None
    """The state where it is no dict."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the state."""
        return self.state.get(name, default)


def make_record(cls: Named, args: tuple[Any, ...]) -> Record:
    """Return an inert record of a class; what an allow-list says of classes that are only data."""
    return Record(cls, args)


class _Mark:
    __slots__ = ()


_MARK: Final = _Mark()


_RENAMED: Final = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy._core.multiarray": "numpy.core.multiarray"}
"""Python 2's, and numpy's, names of the same modules."""


class Machine:
    """One reading. ``at`` is the next byte."""

    def __init__(
        self,
        data: bytes,
        what: str,
        makers: Mapping[str, Callable[[Named, tuple[Any, ...]], Any]],
        constants: Mapping[str, Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.at = 0
        self.data = data
        self._what = what
        self._makers = makers
        self._constants = constants
        self._resolve = persistent
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._containers_left = max(1000, len(data) // 3)

    def fail(self, problem: str) -> NoReturn:
        """Refuse the pickle."""
        raise FormatError(f"cannot read {self._what}: its pickle {problem}; nothing of it was run", path=self._what)

    # ---- bytes of the pickle

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            self.fail("was cut")
        self.at += count
        return found

    def number(self, layout: struct.Struct) -> Any:
        """Return the next number."""
        return layout.unpack(self.take(layout.size))[0]

    def line(self) -> str:
        """Return the text up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    # ---- values

    def push(self, value: Any) -> None:
        """Put a value that takes no memory of its own on the stack."""
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Put a new container on the stack."""
        self._containers_left -= 1
        if self._containers_left < 0:
            self.fail("makes more containers than its size can hold")
        self.stack.append(value)

    def pop(self) -> Any:
        """Take a value from the stack."""
        value = self.stack.pop()
        if value is _MARK:
            self.fail("takes a mark for a value")
        return value

    def mark(self) -> None:
        """Put a mark on the stack."""
        self.stack.append(_MARK)

    def pop_mark(self) -> list[Any]:
        """Take everything down to the last mark."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                self.fail("lacks a mark")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def top(self, cls: type) -> Any:
        """Return the value on top, which must be of exactly this class."""
        value = self.stack[-1]
        if value.__class__ is not cls:
            self.fail(f"treats a {type(value).__name__} as a {cls.__name__}")
        return value

    def put(self, index: int) -> None:
        """Remember the value on top."""
        self._memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        """Put a remembered value on the stack."""
        self.stack.append(self._memo[index])

    def memoize(self) -> None:
        """Remember the value on top under the next number."""
        self._memo[len(self._memo)] = self.stack[-1]

    def pop_tuple(self, count: int) -> None:
        """Make a tuple of the last values."""
        found = tuple(self.stack[-count:])
        if len(found) != count or any(value is _MARK for value in found):
            self.fail("lacks values for a tuple")
        del self.stack[-count:]
        self.push_new(found)

    def set_items(self, pairs: list[Any]) -> None:
        """Put keys and values, in turns, into the dict on top."""
        target = self.top(dict)
        if len(pairs) % 2:
            self.fail("has a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[self._key(key)] = value

    def _key(self, key: Any) -> Any:
        if not (
            isinstance(key, (*_SCALARS, Record, Named)) or (key.__class__ is tuple and all(map(self._key_ok, key)))
        ):
            self.fail(f"has a {type(key).__name__} as a key")
        return key

    def _key_ok(self, key: Any) -> bool:
        self._key(key)
        return True

    # ---- names and calls

    def name(self, module: Any, name: Any) -> None:
        """Put what a name stands for on the stack, if it is allowed."""
        if type(module) is not str or type(name) is not str:
            self.fail("names something by what is no text")
        named = Named(_RENAMED.get(module, module), name)
        if named.full in self._constants:
            self.push(self._constants[named.full])
        elif named.full in self._makers:
            self.push(named)
        else:
            self.fail(f"asks for {named.full[:200]!r}, which is not on the list of what a checkpoint may hold")

    def call(self, args: Any) -> None:
        """Make the value of a name, which is on top, and arguments."""
        named = self.pop()
        if named.__class__ is not Named or args.__class__ is not tuple:
            self.fail("calls what is no class")
        self.push_new(self._makers[named.full](named, args))

    def build(self) -> None:
        """Put a state into the object below it."""
        state = self.pop()
        target = self.stack[-1]
        if target.__class__ is Record:
            _set_state(target, state)
        elif target.__class__ is not dict:  # an OrderedDict's own attributes are nothing to us
            self.fail(f"puts a state into a {type(target).__name__}")

    def persistent(self) -> None:
        """Make the value of a persistent id."""
        key = self.pop()
        if self._resolve is None:
            self.fail("refers to storages outside of it")
        self.push_new(self._resolve(key))


def _set_state(record: Record, state: Any) -> None:
    if state.__class__ is tuple and len(state) == 2 and state[1].__class__ is dict and state[0] in (None, {}):
        state = state[1]  # of classes with slots
    if state.__class__ is dict and all(type(name) is str for name in state):
        record.state.update(state)
    else:
        record.raw_state = state
