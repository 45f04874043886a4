"""FSDP's first generation: what a rank holds of the parameters that it keeps flattened in buckets, as flat ranges.

Everything that is taken from torch's private parts for that stands here. Of a parameter a rank has the elements that
its part of the bucket covers, as a 1-D parameter: possibly some, possibly none.
"""

# ruff: noqa: SLF001 - nothing of this is public

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.geometry.flat import flat_to_boxes
from vescale_ckpt.state.sharded_view import ShardedView

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Which elements of a flattened parameter this rank has: ``start <= index < stop``."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements this rank has."""
        return self.stop - self.start

    def fits(self, local: Any) -> bool:
        """Return whether something has the shape of this rank's part of the parameter."""
        return tuple(getattr(local, "shape", ())) == (self.numel,)

    def view_of(self, local: torch.Tensor) -> ShardedView:
        """Return the view of a 1-D tensor of this rank's elements: of the parameter, or of a state as large as it."""
        local, pieces, at = local.detach(), [], 0
        for box in flat_to_boxes(self.shape, self.start, self.stop):
            pieces.append((box.offset, local[at : at + box.volume].view(box.shape)))
            at += box.volume
        return ShardedView(self.shape, local.dtype, pieces)


def settle(module: nn.Module) -> nn.Module:
    """Bring an FSDP1 module into its sharded form and return what it wraps; what is inside may be FSDP1 again.

    Raises:
        InvalidInputError: it hides its parameters' names or shapes, or is between forward and backward.
    """
    handle: Any = module._handle
    if handle is not None:
        _refuse(handle)
        is_lazy = not hasattr(handle.flat_param, "_full_param_padded")  # nothing was gathered yet
        if handle.uses_sharded_strategy and not is_lazy and not handle.needs_unshard():
            # A root stays gathered after a forward, and would not gather again what a load has changed.
            handle.reshard(True)
            handle.post_reshard()
    return module._fsdp_wrapped_module  # type: ignore[return-value]


def flat_ranges(module: nn.Module) -> dict[int, FlatRange]:
    """Return id of parameter -> what this rank has of it, for the parameters in the bucket of one FSDP1 module."""
    handle: Any = module._handle
    if handle is None or not handle.uses_sharded_strategy:  # unsharded parameters have their shapes
        return {}
    flat = handle.flat_param
    found = {}
    for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
        start, stop = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
        found[id(parameter)] = FlatRange(tuple(shape), start, stop)
        if not 0 <= start <= stop <= math.prod(shape) or parameter.numel() != stop - start:
            raise InvalidInputError(
                f"cannot place an FSDP1 parameter of shape {tuple(shape)}: {parameter.numel()} elements are here, of "
                f"the range {start}:{stop}; save between two steps, outside of summon_full_params()"
            )
    return found


def _refuse(handle: Any) -> None:
    flat = handle.flat_param
    reason = None
    if not handle._use_orig_params:
        reason = "with use_orig_params=False they and their optimizer state have no names; pass use_orig_params=True"
    elif any(extension is not None for extension in flat._param_extensions):
        reason = "it flattens parts of tensor-parallel parameters; use FSDP2 (torch.distributed.fsdp.fully_shard)"
    elif not all(flat._contiguities):
        reason = "it flattens parameters of other strides; make them contiguous before wrapping"
    elif handle._training_state.name != "IDLE" or handle._skipped_use_sharded_views:
        reason = "it is in the middle of a step; save and load between two steps"
    if reason is not None:
        raise InvalidInputError(f"cannot name the parameters of FullyShardedDataParallel (FSDP1): {reason}")
