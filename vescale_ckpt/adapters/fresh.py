"""Fresh state: a whole nested state made from a snapshot alone, where nobody has a target to fill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_ckpt.adapters.draft import Draft, Ranks
from vescale_ckpt.adapters.options import RestoreOptions, Selector
from vescale_ckpt.adapters.rebuild import NOTHING, NewMemory, Rebuilder
from vescale_ckpt.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_ckpt.adapters.draft import Maker
    from vescale_ckpt.format.records import TensorRecord
    from vescale_ckpt.state.leaf import TensorLeaf
    from vescale_ckpt.state.tree import Node, Path


class FreshState:
    """New CPU memory to fill from a snapshot, and the state that it becomes."""

    def __init__(self, draft: Draft, maker: Maker) -> None:
        self.leaves: tuple[TensorLeaf, ...] = tuple(draft.leaves)
        """Stored path to read, and the memory to fill."""
        self.problems: tuple[str, ...] = tuple(draft.problems)
        """Why there is no such state: a per-rank value of which this rank has none, a tensor subclass."""
        self.notes: tuple[str, ...] = tuple(draft.notes)
        self._maker = maker
        self._state: Any = NOTHING

    def finish(self) -> None:
        """Make the state, once all bytes are in place.

        Raises:
            StateError: there are problems.
        """
        if self.problems:
            raise StateError(f"cannot make a state: {len(self.problems)} problems")
        self._state = self._maker()

    @property
    def state(self) -> Any:
        """The state.

        Raises:
            StateError: ``finish`` has not been called.
        """
        if self._state is NOTHING:
            raise StateError("the state is not there yet; fill its leaves and call finish()")
        return self._state


def fresh_state(
    stored: Node, tensors: Mapping[Path, TensorRecord], *, rank: int | None = None, empty: NewMemory | None = None
) -> FreshState:
    """Return a state made as a snapshot has it: dicts, lists, whole CPU tensors, numpy arrays, bytes.

    Modules and optimizers come as dicts by global name. Stored aliases share their memory. A per-rank value is the
    ``PerRank`` of ``rank``; without a rank it is a dict of all ranks' values. ``tensors`` are in the order of the
    manifest, which ``alias_of`` counts in. ``empty`` makes the memory of tensors, in the place of ``torch.empty``.
    """
    draft = Draft(stored, tensors, Selector(RestoreOptions()), ranks=Ranks(rank=rank), same_content=None)
    maker = Rebuilder(draft, empty=empty).make(NOTHING, stored, (), ())
    return FreshState(draft, maker)
