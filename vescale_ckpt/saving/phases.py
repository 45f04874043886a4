"""Phases: an error that a save meets says what was being done, for which snapshot, on which rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from vescale_ckpt.errors import VeScaleError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def naming(phase: str, snapshot: str, rank: int) -> Iterator[None]:
    """Add to an error of the body what it interrupted; one that names a phase already is left as it is."""
    try:
        yield
    except VeScaleError as error:
        if "phase" not in error.context:
            error.context |= {"phase": phase, "snapshot": snapshot, "rank": rank}
            error.message = f"{error.message} - while {phase} {snapshot} on rank {rank}"
            error.args = (error.message,)
        raise
