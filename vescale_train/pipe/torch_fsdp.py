"""Private names of torch's fully_shard that a pipeline asks about. Kept in one file, with a version test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["reshards_after_forward"]


def reshards_after_forward(module: FSDPModule) -> bool:
    """Return whether a fully sharded module frees its gathered weights between forward and backward."""
    state: Any = module._get_fsdp_state()  # noqa: SLF001 - this is the file for it
    return any(group._reshard_after_forward for group in state._fsdp_param_groups)  # noqa: SLF001
