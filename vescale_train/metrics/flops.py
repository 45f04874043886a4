"""Floating-point operations: what a step of a model needs, and what a device could do in that time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vescale_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

PEAK_FLOPS = {
    "A100": {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float16: 756e12, torch.float32: 51e12},
    "H100 NVL": {torch.bfloat16: 835e12, torch.float16: 835e12, torch.float32: 60e12},
    "H100": {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12},
    "H200": {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12},
    "B200": {torch.bfloat16: 2250e12, torch.float16: 2250e12, torch.float32: 80e12},
    "MI300X": {torch.bfloat16: 1307e12, torch.float16: 1307e12, torch.float32: 163e12},
    "L40S": {torch.bfloat16: 362e12, torch.float16: 362e12, torch.float32: 91.6e12},
}
"""Part of a device's name -> dtype -> dense operations a second that its maker states; the first that fits counts."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float:
    """Return how many operations a second a device could do.

    Raises:
        ConfigError: the device or the dtype is not in the table.
    """
    for name, by_dtype in PEAK_FLOPS.items():
        if all(word in device_name for word in name.split()):
            if dtype not in by_dtype:
                raise ConfigError(f"no peak of {dtype} is known for {device_name}: give peak_flops yourself")
            return by_dtype[dtype]
    raise ConfigError(
        f"no peak is known for the device {device_name!r}: give peak_flops yourself, or measure it by measure_flops()"
    )


def measure_flops(device: torch.device, dtype: torch.dtype, *, clock: Callable[[], float], size: int = 1024) -> float:
    """Return how many operations a second a device does in a square matrix product: a practical peak of a processor."""
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        _finish(device)
        begin = clock()
        torch.mm(left, right)
        _finish(device)
        best = min(best, clock() - begin)
    return 2.0 * size**3 / max(best, 1e-9)


def transformer_flops(
    *, num_parameters: int, num_layers: int, width: int, context: int, recompute: bool = False
) -> float:
    """Return the operations a token of a transformer's training step, by the usual formula.

    Six for each parameter that multiplies (two forward, four backward), and twelve x layers x width x context for the
    attention's own products.

    Args:
        num_parameters: without embeddings that are only looked up.
        num_layers: blocks with attention.
        width: of all heads together.
        context: tokens a sequence.
        recompute: whether activations are computed a second time; those operations are work of the hardware and not
            of the model, so leave it False for MFU and set it for HFU.
    """
    forward_and_backward = 6.0 * num_parameters + 12.0 * num_layers * width * context
    return forward_and_backward * (4 / 3 if recompute else 1.0)


def count_flops(do: Callable[[], Any]) -> int:
    """Return the operations of all matrix products and attentions that a call makes; backward counts if it runs one.

    On tensors of the meta device nothing is computed, so the largest model is counted in no time.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        do()
    return int(counter.get_total_flops())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
