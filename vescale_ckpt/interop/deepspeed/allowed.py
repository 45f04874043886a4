"""Classes of DeepSpeed's own that its pickles name, all of them only data."""

from __future__ import annotations

from typing import Final

from vescale_ckpt.interop.torchsave.allowed import with_records

MAKERS: Final = with_records(
    "argparse.Namespace",
    "types.SimpleNamespace",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.utils.tensor_fragment.tensor_fragment",
)
