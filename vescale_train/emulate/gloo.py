"""What gloo's reductions come to, bit by bit, computed in one process.

Floating point addition is not associative, so a sum over ranks depends on the order of additions. gloo's ring adds each
chunk of the buffer in another order, and which chunk an element is in depends on its place in the buffer; the emulation
finds both, so that a run on many ranks can be checked, or a difference explained, without the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vescale_train.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SEGMENT_BYTES = 1 << 20
"""The longest piece of a buffer that gloo's ring sends in one message."""


def chunk_elements(numel: int, element_bytes: int, num_ranks: int) -> int:
    """Return how many elements of a flat buffer one chunk has; chunk ``k`` is that many from ``k`` times as many on."""
    num_bytes = numel * element_bytes
    num_segments = max(_divide_up(num_bytes, num_ranks * MAX_SEGMENT_BYTES), 2)
    segment_bytes = _divide_up(_divide_up(num_bytes, num_ranks * num_segments), element_bytes) * element_bytes
    return num_segments * segment_bytes // element_bytes


def addition_order(chunk: int, num_ranks: int) -> tuple[int, ...]:
    """Return the ranks in the order in which their values of a chunk are added: down the ring from ``chunk - 1``."""
    return tuple((chunk - 1 - step) % num_ranks for step in range(num_ranks))


def all_reduce(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what gloo's ``all_reduce`` with a sum leaves on every rank, given each rank's tensor.

    Raises:
        InvalidInputError: no tensors, or they differ in shape or dtype.
    """
    if not tensors or any(t.shape != tensors[0].shape or t.dtype != tensors[0].dtype for t in tensors):
        raise InvalidInputError(
            f"one tensor a rank is needed, all of one shape and dtype: {[(tuple(t.shape), t.dtype) for t in tensors]}"
        )
    flat = [t.detach().reshape(-1) for t in tensors]
    num_ranks, numel = len(flat), flat[0].numel()
    total = torch.empty_like(flat[0])
    step = chunk_elements(numel, total.element_size(), num_ranks)
    for chunk in range(num_ranks):
        part = slice(min(chunk * step, numel), min((chunk + 1) * step, numel))
        first, *rest = addition_order(chunk, num_ranks)
        running = flat[first][part].clone()
        for rank in rest:
            running += flat[rank][part]
        total[part] = running
    return total.reshape(tensors[0].shape)


def reduce_scatter(tensors: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Return what gloo's ``reduce_scatter_single`` with a sum leaves on ``rank``: its slice along dim 0.

    Raises:
        InvalidInputError: the tensors do not fit together, or dim 0 does not divide by the number of ranks.
    """
    num_ranks = len(tensors)
    total = all_reduce(tensors)
    if total.ndim == 0 or total.shape[0] % num_ranks:
        raise InvalidInputError(f"dim 0 of {tuple(total.shape)} does not divide by {num_ranks} ranks")
    return total.chunk(num_ranks)[rank] if total.numel() else total


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)
