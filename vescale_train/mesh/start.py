"""Starting the process group: from torchrun's environment, or alone in one process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vescale_train.errors import ConfigError
from vescale_train.torch_private import HashStore

if TYPE_CHECKING:
    from datetime import timedelta

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def default_device() -> str:
    """Return the type of device to train on: the accelerator if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def start(device: str, timeout: timedelta) -> None:
    """Start the default process group, unless it is there already.

    Under torchrun the ranks are those of its environment. Without it this process is a world of one.

    Raises:
        ConfigError: if torchrun's environment is there in part.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigError(
            f"cannot start the process group: {', '.join(missing)} not in the environment; start with torchrun, "
            "or unset RANK and WORLD_SIZE to train in one process"
        )
    dist.init_process_group(backend, timeout=timeout)
