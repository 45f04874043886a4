"""Modules that tests of several rooms use."""

from __future__ import annotations

import torch
from torch import nn


class WithExtra(nn.Module):
    """A module with extra state of any kind."""

    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state
