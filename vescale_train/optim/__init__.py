"""Optimizers over many ranks: sharded state, norms over all meshes, whole-matrix updates by one owner."""

from vescale_train.optim.basic import BasicOptimizer
from vescale_train.optim.blocks import blocks_of
from vescale_train.optim.choose import optimizer
from vescale_train.optim.flat_fsdp import FlatShardedDataParallel
from vescale_train.optim.fsdp import fully_shard_policy, is_fully_sharded
from vescale_train.optim.muon import MuonByOwner
from vescale_train.optim.norm import clip_grad_norm
from vescale_train.optim.recompute import recompute_activations
from vescale_train.optim.zero import DistributedOptimizer

__all__ = [
    "BasicOptimizer",
    "DistributedOptimizer",
    "FlatShardedDataParallel",
    "MuonByOwner",
    "blocks_of",
    "clip_grad_norm",
    "fully_shard_policy",
    "is_fully_sharded",
    "optimizer",
    "recompute_activations",
]
