"""Losses that are one number over all ranks: cross entropy with classes, tokens or both shared out."""

from vescale_train.loss.context import parallel_loss
from vescale_train.loss.cross_entropy import cross_entropy

__all__ = ["cross_entropy", "parallel_loss"]
