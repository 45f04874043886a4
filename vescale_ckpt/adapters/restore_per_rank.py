"""Per-rank values: each rank's own, back to it; in another world, made by the caller's function from all of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vescale_ckpt.adapters.draft import Draft, Maker, Phase
from vescale_ckpt.adapters.rank_places import Entry, axes_of, entries_of, own_entry
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.per_rank import PerRank, RankPlace
from vescale_ckpt.state.tree import Node, Path, PerRankNode, fqn

if TYPE_CHECKING:
    from collections.abc import Callable


class PerRankRestorer:
    """Plans the restore of per-rank values for one rank of a world."""

    def __init__(self, draft: Draft, make: Callable[[Node, Path, Path], Maker]) -> None:
        self._draft = draft
        self._make = make
        """(stored node, its path, name) -> what makes it anew."""

    def plan(
        self, target: PerRank[Any], node: PerRankNode, stored: Path, path: Path
    ) -> tuple[Entry | None, Maker | None]:
        """Return the entry to fill the target's value from, or what makes the whole target from all entries.

        Neither: the values are of another world, which is now among the problems.
        """
        name, ranks = fqn(path), self._draft.ranks
        try:
            axes = axes_of(target, name)
        except InvalidInputError as error:
            self._draft.problems.append(error.message)
            return None, None
        entries = entries_of(node, stored, ranks.saved_world_size)
        here = RankPlace(
            rank=-1 if ranks.rank is None else ranks.rank,
            world_size=ranks.world_size or (entries[0].place.world_size if entries else 0),
            mesh={axis: size for axis, (_, size) in axes.items()},
            coordinate={axis: position for axis, (position, _) in axes.items()},
        )
        own = own_entry(entries, here)
        if own is not None:
            return own, None
        if target.reshard is not None and entries:
            return None, self._resharded(target, entries, here, path)
        self._draft.problems.append(_of_another_world(entries, here, name))
        return None, None

    def _resharded(self, target: PerRank[Any], entries: tuple[Entry, ...], here: RankPlace, path: Path) -> Maker:
        reshard, value = target.reshard, target.value
        assert reshard is not None  # noqa: S101 -- narrows the type
        makers = [(e.place, self._make(e.node, e.path, (*path, e.place.rank))) for e in entries]
        self._draft.notes.append(
            f"'{fqn(path)}': per rank, of {_world(entries[0].place)}, made for {_world(here)} by "
            f"{getattr(reshard, '__qualname__', type(reshard).__name__)}"
        )

        def made() -> Any:
            return reshard([(place, maker()) for place, maker in makers], here)

        if not callable(getattr(value, "load_state_dict", None)):
            return lambda: dataclasses.replace(target, value=made())
        self._draft.later(Phase.STATEFUL, lambda: value.load_state_dict(made()))
        return lambda: target


def _of_another_world(entries: tuple[Entry, ...], here: RankPlace, name: str) -> str:
    saved = _world(entries[0].place) if entries else "0 ranks"
    at = f" at {dict(here.coordinate)}" if here.mesh else ""
    return (
        f"'{name}': the snapshot has it per rank, of {saved}; this is rank {here.rank}{at} of {_world(here)}; load in "
        f"such a world, say what becomes of the values with PerRank(..., reshard=), or keep what each rank has with "
        f"ignore=({name!r},)"
    )


def _world(place: RankPlace) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in place.mesh.items())
    return f"{place.world_size} ranks{f' ({mesh})' if mesh else ''}"
