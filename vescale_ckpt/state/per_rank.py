"""Per-rank values: what every rank has its own of, said by the caller and never guessed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PerRank(Generic[T]):
    """A value of which every rank has its own: a random generator's state, the position of a data loader.

    It is stored once per rank and goes back to the rank that saved it; a load with another number of ranks is refused
    unless the key is ignored. Tensors inside are plain ones: a DTensor is one tensor of all ranks, and stays outside.
    """

    value: T
    """Anything that a state may hold: tensors, plain values, containers, objects with ``state_dict``."""
