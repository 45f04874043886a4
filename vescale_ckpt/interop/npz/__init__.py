"""numpy's ``.npz`` and ``.npy`` files."""

from vescale_ckpt.interop.npz.snapshot import NpzSnapshot

__all__ = ["NpzSnapshot"]
