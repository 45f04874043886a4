"""A model to make plans for, right and wrong; no tensor of it is ever made."""

from __future__ import annotations

import torch
from torch import nn

from vescale_train.plan import Names


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(8, 24, bias=False)
        self.up_proj = nn.Linear(8, 24)
        self.down_proj = nn.Linear(24, 8)

    def forward(self, x, scale=None):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x if scale is None else x * scale))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.kinds = nn.Embedding(2, 8)
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.norm(self.words(tokens)))


with torch.device("meta"):
    NET = Net()
NAMES = Names.of(NET)
