"""Checkpoints of other libraries, opened in place: what they share, whatever their format."""

from vescale_ckpt.interop.foreign.regions import Chunk, Region
from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor, RegionSnapshot

__all__ = ["Chunk", "ForeignSnapshot", "ForeignTensor", "Region", "RegionSnapshot"]
