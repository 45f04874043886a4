"""DeepSpeed: ZeRO stages 1 to 3, put together from every rank's flat partitions, and universal checkpoints."""

from vescale_ckpt.interop.deepspeed.universal import UniversalSnapshot
from vescale_ckpt.interop.deepspeed.zero import ZeroSnapshot

__all__ = ["UniversalSnapshot", "ZeroSnapshot"]
