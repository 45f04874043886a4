"""Units: how much of a flattened tensor, or of a buffer of several, each rank is given; pure arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vescale_train.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence


def balanced_units(length: int, num_ranks: int, blocks: Sequence[int] = (1,)) -> tuple[int, ...]:
    """Return units, as even as can be, so that no cut goes through a block.

    A unit is the least common multiple of the blocks: rows of matrices, blocks of a quantized optimizer. With fewer
    units than ranks the last ranks hold none.

    Args:
        length: rows that are cut (the product of the flattened dims).
        num_ranks: how many share them.
        blocks: sizes, in rows, that must stay whole.

    Raises:
        LayoutError: the length is not a multiple of the blocks' least common multiple.
    """
    if num_ranks < 1 or any(block < 1 for block in blocks):
        raise LayoutError(f"cannot share {length} rows in blocks {tuple(blocks)} over {num_ranks} ranks")
    unit = math.lcm(*blocks)
    if length < 1 or length % unit:
        raise LayoutError(
            f"cannot cut {length} rows between blocks of {tuple(blocks)}: the least common multiple is {unit}; pad "
            f"them to {-(-max(length, 1) // unit) * unit}"
        )
    each, more = divmod(length // unit, num_ranks)
    return tuple(each + (rank < more) for rank in range(num_ranks))


def weighted_units(num_units: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return so many units shared out in proportion to weights (a rank's speed or memory), to the nearest unit.

    Raises:
        LayoutError: a weight is negative, or all are 0.
    """
    if num_units < 1 or not weights or min(weights) < 0 or sum(weights) <= 0:
        raise LayoutError(f"cannot share {num_units} units out by weights {tuple(weights)}")
    exact = [num_units * weight / sum(weights) for weight in weights]
    units = [math.floor(share) for share in exact]
    # what rounding left goes to those that lost most by it
    by_loss = sorted(range(len(weights)), key=lambda rank: (units[rank] - exact[rank], rank))
    for rank in by_loss[: num_units - sum(units)]:
        units[rank] += 1
    return tuple(units)
