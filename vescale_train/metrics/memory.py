"""Memory of this process: of the host and of the device, now and at most."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes in use by this process."""

    host_peak_bytes: int
    """The most that was ever resident."""
    device_bytes: int
    """0 without a device."""
    device_peak_bytes: int
    """The most since ``reset_peak``."""


def read_memory(device: torch.device | None = None) -> Memory:
    """Return what is in use on the host and on a CUDA device."""
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device is None or device.type != "cuda":
        return Memory(host_peak_bytes=host, device_bytes=0, device_peak_bytes=0)
    return Memory(
        host_peak_bytes=host,
        device_bytes=torch.cuda.memory_allocated(device),
        device_peak_bytes=torch.cuda.max_memory_allocated(device),
    )


def reset_peak(device: torch.device | None = None) -> None:
    """Count the device's peak from now on; the host's cannot be reset."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
