"""``torch.save`` files: tensors read in place, everything else as plain data, nothing run."""

from vescale_ckpt.interop.torchsave.archive import Archive
from vescale_ckpt.interop.torchsave.snapshot import TorchSaveSnapshot

__all__ = ["Archive", "TorchSaveSnapshot"]
