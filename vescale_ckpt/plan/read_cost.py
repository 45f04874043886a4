"""The cost of reading what several ranks need: each from storage, or one of them from storage and all from it. Pure.

Which is faster depends on how many they are and on what storage and links give. Handing 2 ranks the parts that the
other one read saves half of the reading and adds half of the bytes on a link; among 32 ranks it saves nearly all.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Final

from vescale_ckpt.errors import ConfigError

_RECORD: Final = struct.Struct("<4d")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCost:
    """What storage and links give. The defaults are those of one storage that all ranks share, and share out."""

    rank_bytes_per_second: float = 1e9
    """From storage to one rank, the others being idle."""
    storage_bytes_per_second: float = 1e9
    """From storage to all ranks together; ``inf`` where each has a disk of its own, or the same bytes are cached."""
    link_bytes_per_second: float = 1e9
    """That one rank sends while it receives as many."""
    exchange_seconds: float = 0.0
    """That an exchange takes however little it carries."""

    def __post_init__(self) -> None:
        rates = (self.rank_bytes_per_second, self.storage_bytes_per_second, self.link_bytes_per_second)
        if not all(rate > 0 for rate in rates) or not self.exchange_seconds >= 0:
            raise ConfigError(f"cannot tell what reading costs by {self}: rates are above 0, and seconds not below")

    def direct_seconds(self, num_ranks: int, num_bytes: int) -> float:
        """Return how long it takes that each of some ranks reads the same bytes."""
        return num_bytes / self._rate(num_ranks)

    def shared_seconds(self, num_ranks: int, num_bytes: int) -> float:
        """Return how long it takes that each reads its part of the bytes and they exchange the parts."""
        part = num_bytes / num_ranks
        return part / self._rate(num_ranks) + (num_bytes - part) / self.link_bytes_per_second + self.exchange_seconds

    def shares(self, num_ranks: int, num_bytes: int) -> bool:
        """Return whether some ranks that need the same bytes share the reading; they do when it costs them nothing."""
        return self.shared_seconds(num_ranks, num_bytes) <= self.direct_seconds(num_ranks, num_bytes)

    def _rate(self, num_ranks: int) -> float:
        return min(self.rank_bytes_per_second, self.storage_bytes_per_second / num_ranks)

    def encode(self) -> bytes:
        """Return the record by which one rank tells the others, so that all decide alike."""
        return _RECORD.pack(*(getattr(self, field.name) for field in fields(self)))

    @classmethod
    def decode(cls, data: bytes) -> ReadCost:
        """Return what ``encode`` told."""
        return cls(**dict(zip((field.name for field in fields(cls)), _RECORD.unpack(data), strict=True)))


RECORD_BYTES: Final = _RECORD.size
