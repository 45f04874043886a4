"""ByteCheckpoint folders: DCP-like parts, ``model``, ``optimizer`` and others, side by side."""

from vescale_ckpt.interop.bytecheckpoint.snapshot import ByteCheckpointSnapshot

__all__ = ["ByteCheckpointSnapshot"]
