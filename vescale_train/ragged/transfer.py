"""Transfer: from one way to cut a tensor over the ranks of an axis to another, by one exchange.

Both ways are layouts, so what goes from a rank to another is the intersection of boxes; sender and receiver work out
the same boxes in the same order, and nothing but the elements travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from vescale_ckpt.layout.layout import Layout, Span, local_shape, spans
from vescale_ckpt.layout.placement import Placement, Replicate
from vescale_train.comm import exchange

if TYPE_CHECKING:
    from vescale_ckpt.geometry.box import Box

Shape: TypeAlias = tuple[int, ...]


def transfer(
    local: torch.Tensor, shape: Shape, source: Placement, target: Placement, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return this rank's part of a tensor under another placement over a group; all ranks call it.

    Args:
        local: its part under the source placement.
        shape: of what the group holds together.
        source: how it is cut now.
        target: how it is to be cut.
        group: the ranks along the axis.

    Raises:
        LayoutError: a placement does not fit the shape; on all ranks alike.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    before, after = Layout((num_ranks,), (source,)), Layout((num_ranks,), (target,))
    made = local.new_empty(local_shape(after, shape, (rank,)))
    mine = spans(before, shape, (rank,))
    wanted = spans(after, shape, (rank,))
    contiguous = local.contiguous()
    if isinstance(source, Replicate):
        for span in wanted:
            span.view_of(made).copy_(local[span.box.slices])
        return made
    parts = [_packed(contiguous, mine, spans(after, shape, (r,))) for r in range(num_ranks)]
    incoming = [spans(before, shape, (r,)) for r in range(num_ranks)]
    counts = [sum(box.volume for _, _, box in _meetings(theirs, wanted)) for theirs in incoming]
    for theirs, received in zip(incoming, exchange(parts, counts, group), strict=True):
        _unpack(made, received, theirs, wanted)
    return made


def _packed(local: torch.Tensor, mine: tuple[Span, ...], wanted: tuple[Span, ...]) -> torch.Tensor:
    """Return the elements of this rank that another wants, in the order in which both list them."""
    found = [span.view_of(local)[_within(box, span)].reshape(-1) for span, _, box in _meetings(mine, wanted)]
    return torch.cat([local.new_empty(0), *found])


def _unpack(made: torch.Tensor, received: torch.Tensor, theirs: tuple[Span, ...], wanted: tuple[Span, ...]) -> None:
    at = 0
    for _, span, box in _meetings(theirs, wanted):
        span.view_of(made)[_within(box, span)] = received[at : at + box.volume].view(box.shape)
        at += box.volume


def _meetings(source: tuple[Span, ...], target: tuple[Span, ...]) -> list[tuple[Span, Span, Box]]:
    """Return every pair of spans that meet, and the box in which they do."""
    return [
        (one, other, box)
        for one in source
        for other in target
        if (box := one.box.intersect(other.box)) is not None and box.volume
    ]


def _within(box: Box, span: Span) -> tuple[slice, ...]:
    """Return where a box is in a span that holds it."""
    starts = (offset - origin for offset, origin in zip(box.offset, span.box.offset, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, box.shape, strict=True))
