"""Per-rank values: what every rank has its own of, said by the caller and never guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from vescale_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where one rank stands among those that save or load together."""

    rank: int
    world_size: int
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axis -> how many positions it has, outermost first; empty where no mesh was given."""
    coordinate: Mapping[str, int] = field(default_factory=dict)
    """Axis -> this rank's position, of the same axes."""

    def __post_init__(self) -> None:
        for name in ("mesh", "coordinate"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


Reshard: TypeAlias = "Callable[[Sequence[tuple[RankPlace, Any]], RankPlace], T]"
"""(every saved rank's place and value, by coordinate or else by rank; this rank's place) -> this rank's value."""


@dataclass(frozen=True, slots=True)
class PerRank(Generic[T]):
    """A value of which every rank has its own: a random generator's state, the position of a data loader.

    It is stored once per rank and goes back to the rank that saved it, or, where both sides give a mesh, to the rank at
    the same coordinate. Another number of ranks, or a mesh of other axes, is another world: there a load is refused,
    unless ``reshard`` says what becomes of the values or the key is ignored. Tensors inside are plain ones: a DTensor
    is one tensor of all ranks, and stays outside.

    Raises:
        ConfigError: ``reshard`` is no function.
    """

    value: T
    """Anything that a state may hold: tensors, plain values, containers, objects with ``state_dict``."""
    mesh: DeviceMesh | Mapping[str, tuple[int, int]] | None = None
    """Where this rank is, to be stored with the value: a mesh that it is in, or axis -> (position, size)."""
    reshard: Reshard[T] | None = None
    """Merges and splits the values of another world, at load, on each rank for itself: from all saved values (plain
    ones, CPU tensors, states of objects) to what this rank goes on with. Its result replaces ``value``, or is given to
    the ``load_state_dict`` that ``value`` has. That nothing is lost or done twice is for the function to see to. It is
    not stored, and not called where the world is the same."""

    def __post_init__(self) -> None:
        if self.reshard is not None and not callable(self.reshard):
            raise ConfigError(f"cannot reshard with {self.reshard!r}: pass a function of (saved values, this place)")
