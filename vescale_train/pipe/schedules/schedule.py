"""A schedule as data: what every pipeline rank does, in order, and its CSV text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.errors import ConfigError
from vescale_train.pipe.schedules.instruction import Instruction, kind_of, parse_instructions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Row = tuple[Instruction | None, ...]
"""What one rank does; None is a time step in which it does nothing (meaningful for readers only)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What each rank of a pipeline does with each micro-batch on each of its stages.

    Nothing is checked here beyond counts: ``validate_pipeline_schedule`` proves that a schedule is right.
    """

    rows: tuple[Row, ...]
    """One row a rank."""
    num_stages: int
    num_microbatches: int
    name: str = "custom"
    forward_only: bool = False

    def __post_init__(self) -> None:
        if not self.rows or self.num_stages < 1 or self.num_microbatches < 1:
            raise ConfigError(
                f"cannot make schedule {self.name!r}: {len(self.rows)} ranks, {self.num_stages} stages and "
                f"{self.num_microbatches} micro-batches; all must be at least 1"
            )

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks, one a row."""
        return len(self.rows)

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Give what a rank does, in order, overlaps taken apart, idle steps left out."""
        for cell in self.rows[rank]:
            if cell is not None:
                yield from cell.leaves()

    def kinds(self) -> set[str]:
        """Return the names of all kinds that occur, those inside overlaps too."""
        return {leaf.kind for rank in range(self.num_ranks) for leaf in self.instructions(rank)}

    @property
    def has_comms(self) -> bool:
        """Whether sends and receives are written out, rather than left to the runtime."""
        return any(kind is not None and kind.role in {"send", "receive"} for kind in map(kind_of, self.kinds()))

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into its part for inputs and its part for weights."""
        return bool(self.kinds() & {"I", "W"})

    def stage_ranks(self) -> dict[int, int]:
        """Return the rank of every stage that occurs; of a stage on two ranks (an error), the first."""
        found: dict[int, int] = {}
        for rank in range(self.num_ranks):
            for leaf in self.instructions(rank):
                found.setdefault(leaf.stage, rank)
        return found

    def csv(self) -> str:
        """Return the schedule as text: a line a rank, a cell an instruction, empty cells for idle steps."""
        lines = [",".join("" if cell is None else str(cell) for cell in row) for row in self.rows]
        return "".join(f"{line}\n" for line in lines)


def schedule_from_text(
    text: str,
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    name: str = "custom",
) -> Schedule:
    """Read a schedule: one line a rank, instructions split by commas or spaces, ``#`` starts a comment.

    Empty cells between commas are idle steps. Ranges (``0F0..3``) are written out. How many stages and micro-batches
    there are is taken from the text unless given; a forward-only schedule is one without any backward.

    Raises:
        ConfigError: a cell cannot be read (the message says where), or there is no instruction at all.
    """
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if content or ("," in line and "#" not in line):
            rows.append(tuple(_cells(content, number)))
    leaves = [leaf for row in rows for cell in row if cell is not None for leaf in cell.leaves()]
    if not leaves:
        raise ConfigError("cannot read a schedule: the text has no instruction")
    return Schedule(
        rows=tuple(rows),
        num_stages=num_stages or 1 + max(leaf.stage for leaf in leaves),
        num_microbatches=num_microbatches or 1 + max(leaf.microbatch or 0 for leaf in leaves),
        name=name,
        forward_only=not any(leaf.kind in {"B", "I", "W"} for leaf in leaves),
    )


def _cells(content: str, number: int) -> Iterable[Instruction | None]:
    for cell in content.split(","):
        words = cell.split()
        if not words:
            yield None
        for word in words:
            try:
                yield from parse_instructions(word)
            except ConfigError as error:
                raise ConfigError(f"line {number} of the schedule: {error.message}") from None
