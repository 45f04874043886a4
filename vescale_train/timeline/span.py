"""A span: one named stretch of time on one rank, on a clock that all ranks share. The word that this room speaks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(enum.StrEnum):
    """What a span's time was spent on; the report adds up by it."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    """Counts as computation; told apart because no other rank waits for it."""
    CHECKPOINT = "checkpoint"
    DATA = "data"
    OTHER = "other"


KIND_OF_NAME = {
    "forward": Kind.COMPUTE,
    "backward": Kind.COMPUTE,
    "send": Kind.COMMUNICATION,
    "recv": Kind.COMMUNICATION,
    "reduce": Kind.COMMUNICATION,
    "gather": Kind.COMMUNICATION,
    "optimizer": Kind.OPTIMIZER,
    "checkpoint": Kind.CHECKPOINT,
    "data": Kind.DATA,
}
"""The first word of a span's name -> its kind, where the caller does not say."""


def kind_of(name: str) -> Kind:
    """Return the kind that a span's name tells: 'forward 3' and 'forward.block' are computation."""
    word = name.replace(".", " ").replace("-", " ").replace("_", " ").split(" ", 1)[0]
    return KIND_OF_NAME.get(word, Kind.OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch of time [start, stop) on one rank."""

    name: str
    kind: Kind
    rank: int
    start_ns: int
    """On the clock of rank 0, once aligned; the zero of that clock means nothing."""
    stop_ns: int
    track: str = "cpu"
    """What ran it: 'cpu', a device such as 'cuda:0', or a thread of its own. Spans of one track may nest."""
    step: int = 0
    """The training step."""
    link: str = ""
    """Spans of several ranks with the same link meet: none of them can end before the last of them has begun.

    A collective has the same link on all of its ranks, a message on its two ends. The n-th span with a link on one
    rank meets the n-th on the others.
    """
    args: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, for who looks at the trace."""

    def __post_init__(self) -> None:
        if self.stop_ns < self.start_ns:
            raise InvalidInputError(
                f"span '{self.name}' of rank {self.rank} ends {self.start_ns - self.stop_ns} ns before it begins"
            )

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.stop_ns - self.start_ns
