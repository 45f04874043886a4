"""Instructions: the words of a pipeline schedule, and how they are written as text.

One instruction is ``stage, kind, micro-batch``: ``2F0`` is the forward of micro-batch 0 on stage 2, ``1REDUCE_GRAD``
has no micro-batch, ``(0F3;1B2)OVERLAP_F_B`` runs two computations as one. The text is that of torch's schedules, so
their CSV files are understood; ``0F0..3`` is short for four forwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vescale_train.errors import ConfigError

Handler = Callable[["Instruction", Any], None]
"""What a user's instruction does: it is given the instruction and the running engine's context."""

Role = Literal["compute", "send", "receive", "shard", "reduce", "overlap", "user"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What an instruction's kind means for those who check, forecast and draw schedules."""

    name: str
    role: Role
    meaning: str
    microbatch: Literal["needed", "none", "optional"] = "needed"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing that one stage does, usually to one micro-batch."""

    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Instruction, ...] = ()
    """Of an overlap: what runs as one. Its own stage is -1."""

    def __str__(self) -> str:
        """Write it as a cell of a schedule's CSV."""
        if self.parts:
            return f"({';'.join(str(part) for part in self.parts)}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def leaves(self) -> tuple[Instruction, ...]:
        """Return its parts, or itself if it has none."""
        return self.parts or (self,)


FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP = "F", "B", "I", "W", "OVERLAP_F_B"
SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE = "UNSHARD", "RESHARD", "REDUCE_GRAD"

BUILT_IN = (
    Kind(name=FORWARD, role="compute", meaning="forward"),
    Kind(name=BACKWARD, role="compute", meaning="whole backward"),
    Kind(name=BACKWARD_INPUT, role="compute", meaning="backward for the stage's inputs"),
    Kind(name=BACKWARD_WEIGHT, role="compute", meaning="backward for the stage's weights"),
    Kind(name=OVERLAP, role="overlap", meaning="a forward and a backward run as one", microbatch="none"),
    Kind(name=SEND_FORWARD, role="send", meaning="send activations to the next stage"),
    Kind(name=SEND_BACKWARD, role="send", meaning="send gradients to the stage before"),
    Kind(name=RECEIVE_FORWARD, role="receive", meaning="receive activations from the stage before"),
    Kind(name=RECEIVE_BACKWARD, role="receive", meaning="receive gradients from the next stage"),
    Kind(name=UNSHARD, role="shard", meaning="gather the stage's sharded parameters", microbatch="none"),
    Kind(name=RESHARD, role="shard", meaning="free the stage's gathered parameters", microbatch="none"),
    Kind(
        name=REDUCE, role="reduce", meaning="reduce the stage's gradients over data parallel ranks", microbatch="none"
    ),
)

_kinds: dict[str, Kind] = {kind.name: kind for kind in BUILT_IN}
_handlers: dict[str, Handler] = {}
_NAME = re.compile(r"[A-Z](?:[A-Z_]*[A-Z])?")
_CELL = re.compile(r"(\d+)([A-Z](?:[A-Z_]*[A-Z])?)(?:(\d+)(?:\.\.(\d+))?)?")
_OVERLAP_CELL = re.compile(r"\(([^()]*)\)([A-Z_]+)")


def kind_of(name: str) -> Kind | None:
    """Return what an instruction of this name means, or None if nobody has registered it."""
    return _kinds.get(name)


def handler_of(name: str) -> Handler | None:
    """Return what runs a user's instruction, or None for built-in kinds."""
    return _handlers.get(name)


def register_instruction(
    name: str,
    handler: Handler,
    *,
    meaning: str = "",
    microbatch: Literal["needed", "none", "optional"] = "optional",
) -> None:
    """Add an instruction of your own; schedules may then name it, and the engine calls ``handler`` at its place.

    Registering the same name again replaces the handler.

    Args:
        name: capital letters and underscores, like ``LOG_MEMORY``.
        handler: called with the instruction and the engine's ``Context`` on the rank that has the stage.
        meaning: one line for drawings and messages.
        microbatch: whether it is written with a micro-batch.

    Raises:
        ConfigError: the name cannot be written in a schedule, or is a built-in one.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"cannot register instruction {name!r}: names are capital letters and inner underscores")
    if any(kind.name == name for kind in BUILT_IN):
        raise ConfigError(f"cannot register instruction {name!r}: it is built in; choose another name")
    _kinds[name] = Kind(name=name, role="user", meaning=meaning or name.lower(), microbatch=microbatch)
    _handlers[name] = handler


def unregister_instruction(name: str) -> None:
    """Forget a user's instruction; built-in ones stay."""
    if _handlers.pop(name, None) is not None:
        del _kinds[name]


def parse_instructions(cell: str) -> tuple[Instruction, ...]:
    """Return the instructions of one cell: one, or several if it has a range like ``0F0..3``.

    Raises:
        ConfigError: the text is not an instruction.
    """
    text = cell.strip()
    if (overlap := _OVERLAP_CELL.fullmatch(text)) is not None:
        parts = tuple(leaf for part in overlap[1].split(";") for leaf in parse_instructions(part))
        return (Instruction(-1, overlap[2], None, parts),)
    match = _CELL.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"cannot read instruction {cell!r}: expected STAGE KIND [MICROBATCH], like 2F0 or 1REDUCE_GRAD"
        )
    stage, kind, first, last = match.groups()
    if first is None:
        return (Instruction(int(stage), kind),)
    numbers = range(int(first), int(last if last is not None else first) + 1)
    if not numbers:
        raise ConfigError(f"cannot read instruction {cell!r}: the range {first}..{last} is empty")
    return tuple(Instruction(int(stage), kind, number) for number in numbers)
