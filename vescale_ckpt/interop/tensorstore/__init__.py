"""TensorStore: OCDBT databases read in place, and tensors of snapshots as lazy TensorStores."""
