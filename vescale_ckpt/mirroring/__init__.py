"""Mirroring: the snapshots of one store made to be in another one too, object by object, under the same names."""
