"""The state tree: what a checkpoint is made of, apart from the bytes of its tensors."""
