"""Megatron: ``torch_dist`` checkpoints of Megatron-core, and the classic files, one a rank."""

from vescale_ckpt.interop.megatron.dist import MegatronDistSnapshot
from vescale_ckpt.interop.megatron.ranks import MegatronRanksSnapshot

__all__ = ["MegatronDistSnapshot", "MegatronRanksSnapshot"]
