"""The data: batches by a global sample index, which any mesh goes on with to the exact sample."""

from vescale_train.data.order import Order
from vescale_train.data.stream import Data, MapDataset, data, to_device

__all__ = ["Data", "MapDataset", "Order", "data", "to_device"]
