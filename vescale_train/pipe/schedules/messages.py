"""Checks of written-out sends and receives: each has its partner, and both ends count in the same order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vescale_train.pipe.schedules.instruction import Instruction, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_train.pipe.schedules.schedule import Schedule

PARTNER = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}
"""A message's kind -> the kind at its other end, and how far away that stage is."""
NEEDS = {"SEND_F": ("F",), "SEND_B": ("B", "I"), "F": ("RECV_F",), "B": ("RECV_B",), "I": ("RECV_B",)}
"""What must stand earlier in the same row."""


def message_problems(schedule: Schedule) -> Iterator[str]:
    """Give what is wrong with the written-out communication of a schedule; nothing if there is none."""
    if not schedule.has_comms:
        return
    ranks = schedule.stage_ranks()
    everything = [Counter(schedule.instructions(rank)) for rank in range(schedule.num_ranks)]
    for rank, counted in enumerate(everything):
        for leaf, count in counted.items():
            if leaf.kind in PARTNER:
                yield from _partner_problems(leaf, rank, count, ranks, everything)
        yield from _order_problems(schedule, rank, ranks)
    yield from _crossings(schedule, ranks)


def partner_of(leaf: Instruction) -> Instruction:
    """Return the receive of a send, or the send of a receive."""
    kind, distance = PARTNER[leaf.kind]
    return Instruction(leaf.stage + distance, kind, leaf.microbatch)


def _partner_problems(
    leaf: Instruction, rank: int, count: int, ranks: dict[int, int], everything: list[Counter[Instruction]]
) -> Iterator[str]:
    partner = partner_of(leaf)
    other = ranks.get(partner.stage)
    meaning = kind_of(leaf.kind)
    if other is None or partner.stage < 0:
        yield f"rank {rank}: {leaf} has nobody at its other end; stage {leaf.stage} is the first or last one"
    elif other == rank:
        yield f"rank {rank}: {leaf} is between two stages of the same rank, which hand over without messages"
    elif not everything[other][partner]:
        yield f"rank {rank}: {leaf} has no {partner} on rank {other}" + (f" ({meaning.meaning})" if meaning else "")
    if count > 1:
        yield f"rank {rank}: {leaf} stands {count} times"


def _order_problems(schedule: Schedule, rank: int, ranks: dict[int, int]) -> Iterator[str]:
    seen: set[Instruction] = set()
    for leaf in schedule.instructions(rank):
        seen.add(leaf)
        kinds = NEEDS.get(leaf.kind, ())
        wanted = [Instruction(leaf.stage, kind, leaf.microbatch) for kind in kinds]
        if not wanted or (kinds[0] in PARTNER and not _arrives(wanted[0], rank, ranks)):
            continue
        if not seen.intersection(wanted):
            yield f"rank {rank}: {leaf} comes before {' or '.join(map(str, wanted))}"


def _arrives(receive: Instruction, rank: int, ranks: dict[int, int]) -> bool:
    return ranks.get(partner_of(receive).stage, rank) != rank


def _crossings(schedule: Schedule, ranks: dict[int, int]) -> Iterator[str]:
    """Messages between two ranks have no names: the n-th one sent is the n-th one received."""
    sent: dict[tuple[int, int], list[Instruction]] = {}
    received: dict[tuple[int, int], list[Instruction]] = {}
    for rank in range(schedule.num_ranks):
        for leaf in schedule.instructions(rank):
            if leaf.kind in PARTNER and (other := ranks.get(partner_of(leaf).stage)) is not None:
                if leaf.kind.startswith("SEND"):
                    sent.setdefault((rank, other), []).append(leaf)
                else:
                    received.setdefault((other, rank), []).append(partner_of(leaf))
    for (source, target), leaves in sorted(sent.items()):
        arrivals = received.get((source, target), [])
        if Counter(leaves) == Counter(arrivals) and leaves != arrivals:
            number = next(n for n, (a, b) in enumerate(zip(leaves, arrivals, strict=True)) if a != b)
            yield (
                f"message {number} from rank {source} to rank {target} is {leaves[number]}, but rank {target} takes it "
                f"for {arrivals[number]}: both must count in the same order"
            )
