"""Collectives that end: a phase has a name and a deadline, and its error says who did not come and where they are."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from vescale_train.errors import InvalidInputError, RankFailureError, VeScaleError
from vescale_train.torch_private import default_store, group_timeout, set_group_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

_NAMESPACE = "vescale-train/phase"
_counts: dict[str, int] = {}
"""Phases begun by this process, per group: all ranks of a group begin the same ones."""


@contextmanager
def deadline(phase: str, seconds: float, group: ProcessGroup | None = None) -> Iterator[None]:
    """Give the collectives over ``group`` in the block ``seconds`` each; all ranks of the group enter it.

    Each rank leaves word in the rendezvous store when it begins, so that whoever waits in vain can tell for whom. A
    group that ran out of time is of no use any more: end the process, or make a new group.

    Raises:
        InvalidInputError: ``seconds`` is not positive.
        RankFailureError: a collective failed or ran out of time; names the phase, this rank, and the ranks that did
            not come with the phase that each was last seen in.
    """
    if seconds <= 0:
        raise InvalidInputError(f"the deadline of '{phase}' must be positive, not {seconds} s", phase=phase)
    process_group = dist.group.WORLD if group is None else group
    if process_group is None:
        yield
        return
    ranks = dist.get_process_group_ranks(process_group)
    me, place = dist.get_rank(), _place(ranks)
    count = _counts[place] = _counts.get(place, 0) + 1
    default_store().set(f"{place}/{me}", f"{count} {phase}")
    before = group_timeout(process_group)
    set_group_timeout(process_group, timedelta(seconds=seconds))
    try:
        yield
    except VeScaleError:
        raise
    except RuntimeError as error:
        late = _late(place, ranks, count)
        who = "; ".join(f"rank {rank} {where}" for rank, where in late.items()) or "every rank came; a peer died in it"
        raise RankFailureError(
            f"'{phase}' over ranks {ranks} failed on rank {me} within {seconds:g} s: {who} - {error}",
            failures=late,
            phase=phase,
            rank=me,
        ) from error
    finally:
        set_group_timeout(process_group, before)


def _place(ranks: list[int]) -> str:
    """Return where the ranks of a group leave word; the same text on each of them."""
    members = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    return f"{_NAMESPACE}/{members}"


def _late(place: str, ranks: list[int], count: int) -> dict[int, str]:
    """Return, for each rank that has not begun the phase, where it was last seen, as far as the store can tell."""
    late: dict[int, str] = {}
    for rank in ranks:
        key = f"{place}/{rank}"
        try:
            seen = default_store().get(key).decode() if default_store().check([key]) else "0 "
        except RuntimeError:  # the store lived in a process that is gone
            return late
        at, _, phase = seen.partition(" ")
        if int(at) < count:
            late[rank] = f"did not come; it was last seen in '{phase}'" if phase else "did not come to any phase yet"
    return late
