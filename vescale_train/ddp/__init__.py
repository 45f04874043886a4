"""Data parallelism: flat gradient buckets that are reduced while backward runs, or summed in one exact order."""

from vescale_train.ddp.ddp import DistributedDataParallel
from vescale_train.ddp.options import DDPOptions

__all__ = ["DDPOptions", "DistributedDataParallel"]
