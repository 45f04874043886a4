"""Optimizers over many ranks: sharded state, norms over all meshes, whole-matrix updates by one owner."""

from vescale_train.optim.basic import BasicOptimizer
from vescale_train.optim.norm import clip_grad_norm
from vescale_train.optim.zero import DistributedOptimizer

__all__ = ["BasicOptimizer", "DistributedOptimizer", "clip_grad_norm"]
