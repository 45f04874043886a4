"""A check and what it came to, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong; somebody may want to know, or to do something."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    level: Level
    detail: str
    """What was found, and for a bad one what to do."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long requests of one kind took."""

    verb: str
    seconds: tuple[float, ...]
    """Ascending."""
    num_bytes: int
    """Of each."""

    @property
    def median(self) -> float:
        """The middle one, in seconds."""
        return self.seconds[len(self.seconds) // 2]

    @property
    def bytes_per_second(self) -> float:
        """At the median; 0 for requests without a body."""
        return self.num_bytes / self.median if self.num_bytes and self.median else 0.0
