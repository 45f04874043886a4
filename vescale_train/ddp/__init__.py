"""Data parallelism: flat gradient buckets that are reduced while backward runs, or summed in one exact order."""

from vescale_train.ddp.ddp import DDPOptions, DistributedDataParallel

__all__ = ["DDPOptions", "DistributedDataParallel"]
