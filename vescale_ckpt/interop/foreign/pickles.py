"""Pickles read as data: a small machine that understands the opcodes and runs nothing.

Python's own unpickler calls whatever a pickle names. This one knows a closed table of names, and for each a plain
function of ours that makes a value; any other name, and any opcode that no checkpoint needs, ends the reading. Time and
memory are bounded by the pickle's size.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.machine import Machine, Named, Record, make_record
from vescale_ckpt.interop.foreign.opcodes import OPERATIONS, STOP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MAX_PICKLE_BYTES", "Named", "Record", "load_pickle", "make_record"]

MAX_PICKLE_BYTES: Final = 256 << 20
_MAX_STACK: Final = 1_000_000


def load_pickle(
    data: bytes,
    what: str,
    makers: Mapping[str, Callable[[Named, tuple[Any, ...]], Any]],
    *,
    constants: Mapping[str, Any] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value of a pickle.

    Args:
        data: the pickle.
        what: the file, for messages.
        makers: full name of an allowed class or function -> what makes its value of the arguments.
        constants: full name -> value, for names that stand for themselves (dtypes).
        persistent: makes values of persistent ids (storages); None refuses them.

    Raises:
        FormatError: it names something that is not allowed, is no such pickle, or is too large.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise FormatError(f"cannot read {what}: its pickle has {len(data)} bytes, at most {MAX_PICKLE_BYTES} are read")
    machine = Machine(data, what, makers, constants or {}, persistent)
    try:
        return _run(machine)
    except FormatError as error:
        if what in error.message:
            raise
        raise FormatError(f"cannot read {what}: in its pickle, {error.message}", path=what) from error
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise FormatError(
            f"cannot read {what}: its pickle is damaged near byte {machine.at}: {error!r:.200}"
        ) from error
    except RecursionError as error:
        raise FormatError(f"cannot read {what}: its pickle is nested without end") from error


def _run(machine: Machine) -> Any:
    data, stack = machine.data, machine.stack
    while machine.at < len(data):
        code = data[machine.at]
        machine.at += 1
        if code == STOP:
            if len(stack) != 1:
                machine.fail(f"ends with {len(stack)} values")
            return machine.pop()
        operation = OPERATIONS.get(code)
        if operation is None:
            machine.fail(f"has the opcode {bytes([code])!r} at byte {machine.at - 1}, which no checkpoint needs")
        operation(machine)
        if len(stack) > _MAX_STACK:
            machine.fail("piles up values")
    return machine.fail("was cut")
