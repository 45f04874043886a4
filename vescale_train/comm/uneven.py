"""Gathers and reduce-scatters of parts that differ in size, which gloo and NCCL refuse: the parts travel padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vescale_train.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


def sizes_over(size: int, group: ProcessGroup | None, device: torch.device) -> tuple[int, ...]:
    """Return what every rank gave as ``size``, by rank (one small collective)."""
    mine = torch.tensor([size], dtype=torch.int64, device=device)
    out = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather(list(out.chunk(len(out))), mine, group=group)
    return tuple(int(n) for n in out.tolist())


def gather_uneven(
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the tensors of all ranks, one after another along ``dim``; any sizes along it, 0 too, and any dtype.

    ``sizes`` are those along ``dim``, by rank; a caller who knows them saves a collective. Gradients do not flow.

    Raises:
        LayoutError: this rank's size is not what ``sizes`` says.
    """
    local = tensor.detach().movedim(dim, 0).contiguous()
    sizes = sizes_over(len(local), group, local.device) if sizes is None else tuple(sizes)
    _check(len(local), sizes, dist.get_rank(group), "gather")
    widest = max(sizes)
    if widest == 0:
        return tensor.detach().clone()
    row = local.shape[1:]
    sent = local if len(local) == widest else torch.cat([local, local.new_zeros(widest - len(local), *row)])
    received = local.new_empty(len(sizes) * widest, *row)
    dist.all_gather(list(_bytes(received).chunk(len(sizes))), _bytes(sent), group=group)
    if min(sizes) < widest:
        received = torch.cat([received[r * widest : r * widest + n] for r, n in enumerate(sizes)])
    return received.movedim(0, dim)


def reduce_scatter_uneven(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    group: ProcessGroup | None = None,
    dim: int = 0,
) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' tensors; rank ``r`` keeps ``sizes[r]`` along ``dim``.

    The order of additions is the library's own; where bits matter see ``canonical_reduce_scatter``.

    Raises:
        LayoutError: the sizes do not add up to the tensor's, or are not one a rank.
    """
    sizes = tuple(sizes)
    whole = tensor.detach().movedim(dim, 0).contiguous()
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(sizes) != num_ranks or sum(sizes) != len(whole):
        raise LayoutError(f"cannot scatter dim {dim} of {tuple(tensor.shape)} over {num_ranks} ranks by sizes {sizes}")
    widest = max(sizes)
    if min(sizes) < widest:
        padded = whole.new_zeros(num_ranks, widest, *whole.shape[1:])
        for to, part in zip(padded, torch.split(whole, list(sizes)), strict=True):
            to[: len(part)] = part
        whole = padded.flatten(0, 1)
    kept = whole.new_empty(widest, *whole.shape[1:])
    if kept.numel():
        dist.reduce_scatter(kept, list(whole.chunk(num_ranks)), group=group)
    return kept[: sizes[rank]].movedim(0, dim)


def exchange(parts: Sequence[torch.Tensor], incoming: Sequence[int], group: ProcessGroup | None) -> list[torch.Tensor]:
    """Send ``parts[r]`` (1-D, one dtype) to every rank ``r``; return the ``incoming[r]`` elements each sent here."""
    sent = torch.cat(list(parts))
    item = sent.element_size()
    received = sent.new_empty(sum(incoming))
    dist.all_to_all_single(
        _bytes(received),
        _bytes(sent),
        output_split_sizes=[n * item for n in incoming],
        input_split_sizes=[part.numel() * item for part in parts],
        group=group,
    )
    return list(torch.split(received, list(incoming)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory: every back end moves bytes, not every one moves every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _check(mine: int, sizes: Sequence[int], rank: int, what: str) -> None:
    if sizes[rank] != mine:
        raise LayoutError(
            f"cannot {what}: rank {rank} holds {mine} where the sizes by rank are {tuple(sizes)}", rank=rank
        )
