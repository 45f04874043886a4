"""Questions and their cases: what is asked, as data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench

OURS = "vescale-ckpt"
DCP = "torch DCP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large everything is; questions make their cases from it."""

    name: str
    repeats: int
    state_bytes: int
    """Of the model with its Adam moments."""
    width: int
    """Of the model."""
    vocab_size: int
    num_small: int
    """Tensors of 4 KiB."""
    reshard_bytes: int
    """Of the state that goes from layout to layout."""
    s3_bytes: int
    plan_ranks: int
    plan_tensors: int
    most_ranks: int
    """Ranks of the largest world that is planned for."""
    num_chunks: int
    """Of the largest manifest."""
    num_snapshots: int
    training_bytes: int
    """Of the state of the training loop."""


TINY = Scale(
    name="tiny",
    repeats=1,
    state_bytes=1_000_000,
    width=64,
    vocab_size=256,
    num_small=40,
    reshard_bytes=1 << 20,
    s3_bytes=1_000_000,
    plan_ranks=8,
    plan_tensors=16,
    most_ranks=16,
    num_chunks=2_000,
    num_snapshots=4,
    training_bytes=1_000_000,
)
"""For the test suite: proves that everything runs and that exact counters are right; times mean nothing."""

QUICK = Scale(
    name="quick",
    repeats=3,
    state_bytes=60_000_000,
    width=256,
    vocab_size=8192,
    num_small=2_000,
    reshard_bytes=32 << 20,
    s3_bytes=32_000_000,
    plan_ranks=1024,
    plan_tensors=1024,
    most_ranks=1024,
    num_chunks=200_000,
    num_snapshots=100,
    training_bytes=30_000_000,
)

FULL = Scale(
    name="full",
    repeats=5,
    state_bytes=1_540_000_000,
    width=1024,
    vocab_size=50257,
    num_small=20_000,
    reshard_bytes=256 << 20,
    s3_bytes=400_000_000,
    plan_ranks=1024,
    plan_tensors=1024,
    most_ranks=16_384,
    num_chunks=2_000_000,
    num_snapshots=1_000,
    training_bytes=600_000_000,
)

SCALES = {scale.name: scale for scale in (TINY, QUICK, FULL)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A number to reach: a quantity of one side over a quantity of another, or of the same."""

    name: str
    of: tuple[str, str]
    """(side, quantity): a field of ``Sample`` or one of its counters."""
    to: tuple[str, str]
    at_most: float | None = None
    """The goal; None where the ratio is only watched."""
    exact: bool = False
    """Counted and not timed: the same on any machine, so the baseline allows no more than rounding."""


def against(name: str, quantity: str, other: str, at_most: float | None = None, *, exact: bool = False) -> Ratio:
    """Return the ratio of a quantity of ours to the same one of another side."""
    return Ratio(name=name, of=(OURS, quantity), to=(other, quantity), at_most=at_most, exact=exact)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to measure. Questions add fields of their own, which go to the result as its parameters."""

    name: str
    storage: str = "none"
    """``disk``, ``tmpfs``, ``s3``, ``memory`` or ``none``."""
    ratios: tuple[Ratio, ...] = ()
    sweep: tuple[str, int] | None = None
    """(axis, value) of a case that is a point of a curve of cost over that axis; points share ``curve``."""
    curve: str = ""
    world_size: int = 1
    """Processes that save or load together."""
    repeats: int | None = None
    """Other than the scale says."""
    deadline_seconds: float = 900.0

    def parameters(self) -> dict[str, Any]:
        """Return the fields that a question added."""
        common = {field.name for field in dataclasses.fields(Case)}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in common}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked, and how it is answered."""

    name: str
    title: str
    text: str
    """What is measured and what each side does, for who doubts it."""
    cases: Callable[[Scale], Sequence[Case]]
    run: Callable[[Any, Bench], None]
    """Adds samples of every side; called once a case, in a process of its own."""
    columns: tuple[str, ...] = ()
    """Counters to show in tables beside the times."""
    timed: bool = True
    """False: only counters are shown, for times have no meaning here."""
