"""Bytes: back ends, packs, refs and transactions of a content-addressed store. Knows no tensors."""
