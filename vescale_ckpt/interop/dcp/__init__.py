"""torch.distributed.checkpoint on the store: a StorageWriter and a StorageReader, passed to torch's own functions."""

from vescale_ckpt.interop.dcp.reader import DCPReader
from vescale_ckpt.interop.dcp.writer import DCPWriter

__all__ = ["DCPReader", "DCPWriter"]
