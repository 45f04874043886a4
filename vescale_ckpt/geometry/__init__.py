"""Boxes of a tensor's global index space: algebra, tiles, flat ranges, cover proofs. Pure."""
