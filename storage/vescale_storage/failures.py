"""The one error that all ranks raise when a save fails, made of abort records or of the ranks that stayed silent."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from vescale_storage.errors import RankFailureError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vescale_storage.fragment import AbortRecord

_NUM_SPELLED: Final = 3
"""Failures that the message itself spells out; ``failures`` holds all of them."""
_NUM_RUNS: Final = 20


def aborted(
    transaction: str, phase: str, coordinator: int, records: Mapping[int, AbortRecord | None]
) -> RankFailureError:
    """Return the error for abort records by rank; None stands for one that is there and cannot be read.

    What a rank says of itself counts more than what the coordinator says of it, and a coordinator that failed because
    of others is not itself among the failures.
    """
    failures: dict[int, str] = {}
    head = records.get(coordinator)
    if head is not None:
        failures |= {rank: printable(text) for rank, text in head.failures.items()}
    for rank, record in records.items():
        if record is None:
            failures.setdefault(rank, "aborted; its record cannot be read")
        elif rank != coordinator or not record.failures:
            failures[rank] = printable(f"{record.kind}: {record.message}")
    failures = dict(sorted(failures.items()))
    spelled = [f"rank {rank}: {text}" for rank, text in itertools.islice(failures.items(), _NUM_SPELLED)]
    more = len(failures) - len(spelled)
    tail = f"; and {more} more ranks" if more else ""
    return RankFailureError(
        f"save transaction {transaction} was aborted, seen in phase {phase!r}: {'; '.join(spelled)}{tail}",
        failures=failures,
        phase=phase,
        transaction=transaction,
    )


def silent(
    transaction: str,
    phase: str,
    ranks: Collection[int],
    world_size: int,
    *,
    seconds: float,
    missing: str,
    without_fragment: Collection[int] = (),
    cause: Exception | None,
) -> RankFailureError:
    """Return the error for ranks that left nothing by the deadline.

    ``missing`` says what was waited for; ``without_fragment``, which ranks may be why it did not come.
    """
    failures = dict.fromkeys(without_fragment, "left no fragment")
    failures |= dict.fromkeys(ranks, f"left no {missing} within {seconds:g} s in phase {phase!r}")
    idle = f"; no fragment from {_of_ranks(without_fragment)}" if without_fragment else ""
    storage = f"; the storage's last error was: {cause}" if cause is not None and str(cause) else ""
    return RankFailureError(
        f"waited {seconds:g} s in phase {phase!r} of save transaction {transaction} for {missing}: nothing from "
        f"{_of_ranks(ranks)} of {world_size}{idle}{storage}; look at the logs there, or raise the deadline",
        failures=dict(sorted(failures.items())),
        phase=phase,
        transaction=transaction,
    )


def _of_ranks(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


def format_ranks(ranks: Collection[int]) -> str:
    """Return ranks as ``0-3, 7``, cut after twenty runs of neighbours."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:_NUM_RUNS]]
    return ", ".join(texts) + (", ..." if len(runs) > _NUM_RUNS else "")


def printable(text: str) -> str:
    """Return text that came from a store with everything a terminal would obey escaped; line ends stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else f"{letter!a}"[1:-1] for letter in text)
