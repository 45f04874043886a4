"""Ragged shards: leading dims of a tensor, flattened and cut in any proportion; to and from every other placement.

Importing this teaches ``DTensor.redistribute`` and ``full_tensor`` the placement.
"""

from vescale_train.ragged.operations import ragged_result
from vescale_train.ragged.placement import RaggedShard
from vescale_train.ragged.redistribute import redistribute_local
from vescale_train.ragged.tensor import distribute, from_local
from vescale_train.ragged.units import balanced_units, weighted_units
from vescale_train.torch_private import extend_operations, extend_redistribution

__all__ = ["RaggedShard", "balanced_units", "distribute", "from_local", "weighted_units"]

extend_redistribution(
    lambda old, new: any(isinstance(placement, RaggedShard) for placement in (*old, *new)), redistribute_local
)
extend_operations(ragged_result)
