"""Ranks as threads of one process: a ``Group`` without torch.distributed, to save and load on many ranks in memory.

Ranks meet by turns: the n-th collective of every rank is the same one. A rank that ends while others wait for it makes
them raise, as the broken connections of a dead process would.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from vescale_ckpt.coordinate.group import Group
from vescale_ckpt.errors import RankFailureError


@dataclass
class World:
    """Where the ranks of one ``run_ranks`` meet."""

    size: int
    deadline_seconds: float = 60.0
    changed: threading.Condition = field(default_factory=threading.Condition)
    met: dict[int, dict[int, Any]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def meet(self, turn: int, rank: int, kind: str, value: Any) -> dict[int, Any]:
        """Return every rank's value once all have brought theirs to this turn."""
        with self.changed:
            mine = self.met.setdefault(turn, {})
            assert all(other == kind for other, _ in mine.values()), f"turn {turn}: {kind} against {mine}"
            mine[rank] = (kind, value)
            self.changed.notify_all()
            done = self.changed.wait_for(
                lambda: len(mine) == self.size or self.gone - mine.keys(), self.deadline_seconds
            )
            if len(mine) < self.size:
                why = f"rank {min(self.gone - mine.keys())} has ended" if done else "nobody came"
                raise RankFailureError(f"{kind} failed on rank {rank}: {why}", phase=kind, rank=rank)
            self.met.pop(turn - 1, None)  # everybody has left it
            return {r: v for r, (_, v) in mine.items()}

    def leave(self, rank: int) -> None:
        """Say that a rank takes part in nothing any more."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class ThreadGroup(Group):
    """One rank of a ``World``."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.world_size = world.size
        self.num_collectives = 0
        self.bytes_sent = 0
        self._world = world

    def all_gather_fixed(self, data: bytes) -> list[bytes]:
        found = self._meet("gather", bytes(data))
        assert len({len(d) for d in found.values()}) == 1, "a fixed-size collective with different sizes"
        return [found[r] for r in range(self.world_size)]

    def exchange(self, outgoing, incoming_bytes):
        assert len(outgoing) == len(incoming_bytes) == self.world_size
        self.bytes_sent += sum(t.numel() for t in outgoing)
        found = self._meet("exchange", [t.clone() for t in outgoing])
        received = [found[r][self.rank] for r in range(self.world_size)]
        assert [t.numel() for t in received] == list(incoming_bytes)
        return received

    def _broadcast(self, data: bytes, length: int, root: int) -> bytes:
        found = self._meet("broadcast", (data, length, root))
        assert {(n, r) for _, n, r in found.values()} == {(length, root)}
        assert len(found[root][0]) == length
        return found[root][0]

    def _meet(self, kind: str, value: Any) -> dict[int, Any]:
        self.num_collectives += 1
        return self._world.meet(self.num_collectives, self.rank, kind, value)


def run_ranks(world_size: int, body, *, deadline_seconds: float = 60.0) -> list[Any]:
    """Return what ``body(group)`` returned or raised on each rank, by rank."""
    world = World(world_size, deadline_seconds)
    outcomes: list[Any] = [None] * world_size

    def main(rank: int) -> None:
        try:
            outcomes[rank] = body(ThreadGroup(world, rank))
        except BaseException as error:  # noqa: BLE001 - handed to the test; pytest's own are no Exceptions
            outcomes[rank] = error
        finally:
            world.leave(rank)

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_seconds)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return outcomes


def all_well(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes, or raise the first error among them."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
