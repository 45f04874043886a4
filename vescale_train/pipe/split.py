"""Where a chain of units is cut into stages: pure functions of costs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from vescale_train.pipe.errors import SplitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Cuts = tuple[int, ...]
"""Index of the first unit of each stage, and the number of units at the end: one more than there are stages."""


def stages_of(cuts: Cuts) -> list[int]:
    """Return the stage of every unit."""
    return [stage for stage, (start, end) in enumerate(itertools.pairwise(cuts)) for _ in range(end - start)]


def cut_at(units: Sequence[str], split_points: Sequence[str], num_stages: int) -> Cuts:
    """Cut before the units named.

    Raises:
        SplitError: a name is no unit, names are out of order, or they do not make ``num_stages`` stages.
    """
    unknown = [name for name in split_points if name not in units]
    if unknown:
        raise SplitError(
            f"cannot split at {', '.join(map(repr, unknown))}: no such units; the units are {', '.join(units)}"
        )
    if len(split_points) != num_stages - 1:
        raise SplitError(
            f"cannot split into {num_stages} stages at {len(split_points)} points; that makes {len(split_points) + 1}: "
            "name the first unit of every stage but the first"
        )
    cuts = (0, *(units.index(name) for name in split_points), len(units))
    if any(end <= start for start, end in itertools.pairwise(cuts)):
        raise SplitError(f"cannot split at {', '.join(split_points)}: out of order, or a stage would be empty")
    return cuts


def cut_evenly(num_units: int, blocks: range, num_stages: int) -> Cuts:
    """Cut so that all stages have the same number of blocks, the first ones one more if it does not divide.

    What stands before the blocks goes to the first stage, what follows to the last one.

    Raises:
        SplitError: there are fewer blocks than stages.
    """
    if len(blocks) < num_stages:
        raise SplitError(f"cannot split {len(blocks)} blocks into {num_stages} stages: each needs one at least")
    least, more = divmod(len(blocks), num_stages)
    sizes = [least + (stage < more) for stage in range(num_stages)]
    inner = [blocks.start + start for start in itertools.accumulate(sizes[:-1])]
    return (0, *inner, num_units)


def cut_by_cost(costs: Sequence[float], num_stages: int) -> Cuts:
    """Cut so that the most expensive stage costs as little as possible; no stage is empty.

    Raises:
        SplitError: there are fewer units than stages.
    """
    num_units = len(costs)
    if num_units < num_stages:
        raise SplitError(f"cannot split {num_units} units into {num_stages} stages: each needs one at least")
    ahead = [0.0, *itertools.accumulate(costs)]
    # best[n] = the least that the dearest of the stages so far can cost when they hold the first n units
    best = [0.0] + [float("inf")] * num_units
    came_from: list[list[int]] = []
    for stage in range(num_stages):
        after = [float("inf")] * (num_units + 1)
        source = [0] * (num_units + 1)
        for end in range(stage + 1, num_units - (num_stages - stage - 1) + 1):
            source[end] = min(range(stage, end), key=lambda start: max(best[start], ahead[end] - ahead[start]))
            after[end] = max(best[source[end]], ahead[end] - ahead[source[end]])
        best = after
        came_from.append(source)
    cuts = [num_units]
    for source in reversed(came_from):
        cuts.append(source[cuts[-1]])
    return tuple(reversed(cuts))


def cut_balanced(costs: Sequence[float], num_stages: int, rank_of: Callable[[int], int]) -> Cuts:
    """Cut as ``cut_by_cost``, then move cuts while that evens out the ranks without a dearer dearest stage.

    Args:
        costs: of the units.
        num_stages: stages, of which several may lie on a rank.
        rank_of: the rank of each stage.

    Raises:
        SplitError: there are fewer units than stages.
    """
    ahead = [0.0, *itertools.accumulate(costs)]

    def unevenness(cuts: Cuts) -> tuple[float, float, float]:
        stages = [ahead[end] - ahead[start] for start, end in itertools.pairwise(cuts)]
        ranks: dict[int, float] = {}
        for stage, cost in enumerate(stages):
            ranks[rank_of(stage)] = ranks.get(rank_of(stage), 0.0) + cost
        return max(ranks.values()), max(stages), sum(cost**2 for cost in stages)

    cuts = cut_by_cost(costs, num_stages)
    while True:
        moved = min(_neighbours(cuts), key=unevenness, default=cuts)
        if unevenness(moved) >= unevenness(cuts):
            return cuts
        cuts = moved


def _neighbours(cuts: Cuts) -> list[Cuts]:
    found: list[Cuts] = []
    for place in range(1, len(cuts) - 1):
        moved = (cuts[place] - 1, cuts[place] + 1)
        found += [(*cuts[:place], at, *cuts[place + 1 :]) for at in moved if cuts[place - 1] < at < cuts[place + 1]]
    return found
