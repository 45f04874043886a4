"""Comparing: the values of tensors block by block: statistics of one, differences of two."""
