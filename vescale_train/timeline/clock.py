"""Clocks of several machines on one scale: how far each is from rank 0's, and how sure that is.

Each rank asks rank 0 for its time a few times. The answer was given somewhere between question and return, so the
round trip bounds the error, and the shortest round trip is believed (Cristian; the four times are NTP's). Clocks also
drift: two measurements, at the start and at a flush, give a line.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vescale_ckpt.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 16
"""Questions a rank; the first ones also open the connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One question and its answer, in nanoseconds."""

    sent_ns: int
    """By the asker's clock, as are all but the next two."""
    received_ns: int
    """By the clock asked for."""
    replied_ns: int
    returned_ns: int

    @property
    def round_trip_ns(self) -> int:
        """The time on the way, without that between receipt and reply."""
        return (self.returned_ns - self.sent_ns) - (self.replied_ns - self.received_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """How far a clock is from the reference at one moment."""

    at_ns: int
    """By the local clock."""
    offset_ns: int
    """What to add to the local clock."""
    error_ns: int
    """The most that the offset may be wrong by: half of the round trip."""


NO_OFFSET = Offset(at_ns=0, offset_ns=0, error_ns=0)


def estimate(exchanges: Sequence[Exchange]) -> Offset:
    """Return the offset that the exchange with the shortest round trip tells.

    Raises:
        InvalidInputError: there is no exchange.
    """
    if not exchanges:
        raise InvalidInputError("cannot tell how far two clocks are apart from no exchange at all")
    best = min(exchanges, key=lambda exchange: exchange.round_trip_ns)
    offset = ((best.received_ns - best.sent_ns) + (best.replied_ns - best.returned_ns)) // 2
    middle = (best.sent_ns + best.returned_ns) // 2
    return Offset(at_ns=middle, offset_ns=offset, error_ns=(best.round_trip_ns + 1) // 2)


@dataclass(frozen=True, slots=True)
class Alignment:
    """From a local clock to the reference: a constant, or a line through a first and a last measurement."""

    first: Offset = NO_OFFSET
    last: Offset = NO_OFFSET

    def to_reference(self, local_ns: int) -> int:
        """Return the reference's time at a local time."""
        span = self.last.at_ns - self.first.at_ns
        if span <= 0:
            return local_ns + self.last.offset_ns
        drift = self.last.offset_ns - self.first.offset_ns
        return local_ns + self.first.offset_ns + drift * (local_ns - self.first.at_ns) // span

    def with_measured(self, offset: Offset) -> Alignment:
        """Return the alignment after one more measurement; drift below what can be measured is taken for none."""
        if self.first is NO_OFFSET:
            return Alignment(offset, offset)
        if abs(offset.offset_ns - self.first.offset_ns) <= offset.error_ns + self.first.error_ns:
            best = min(self.first, offset, key=lambda measured: measured.error_ns)
            return Alignment(best, best)
        return Alignment(self.first, offset)

    @property
    def error_ns(self) -> int:
        """The most that a time may be wrong by, near the measurements."""
        return max(self.first.error_ns, self.last.error_ns)


def measure(
    group: dist.ProcessGroup | None,
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], int] = time.monotonic_ns,
) -> Offset:
    """Return how far this rank's clock is from that of the group's rank 0; collective.

    Rank 0 answers one rank after the other, so that no question waits behind another's.

    Args:
        group: ranks that can exchange CPU tensors (gloo); None: this process alone.
        rounds: questions a rank.
        clock: this rank's.
    """
    if group is None or dist.get_world_size(group) == 1:
        return NO_OFFSET
    if dist.get_rank(group) == 0:
        for asker in range(1, dist.get_world_size(group)):
            _answer(group, asker, rounds, clock)
        return NO_OFFSET
    return estimate([_ask(group, clock) for _ in range(rounds)])


def _answer(group: dist.ProcessGroup, asker: int, rounds: int, clock: Callable[[], int]) -> None:
    times = torch.zeros(2, dtype=torch.int64)
    for _ in range(rounds):
        dist.recv(times, group=group, group_src=asker)
        times[0] = clock()
        times[1] = clock()
        dist.send(times, group=group, group_dst=asker)


def _ask(group: dist.ProcessGroup, clock: Callable[[], int]) -> Exchange:
    times = torch.zeros(2, dtype=torch.int64)
    sent = clock()
    dist.send(times, group=group, group_dst=0)
    dist.recv(times, group=group, group_src=0)
    returned = clock()
    received, replied = times.tolist()
    return Exchange(sent_ns=sent, received_ns=received, replied_ns=replied, returned_ns=returned)
