"""A GPT in plain torch with dropout and tied weights, its data, and its plan: what the worlds of this folder train."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 2
GLOBAL_BATCH, MICRO_BATCHES = 8, 4


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.attention_norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, dropout=0.0, layers=LAYERS):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "parameter": {
        r"blocks\.\d+\.(query|key|value|up)\.weight": [Shard(0)],
        r"blocks\.\d+\.up\.bias": [Shard(0)],
        r"blocks\.\d+\.(output|down)\.weight": [Shard(1)],
    },
    "forward": {
        r"blocks\.\d+\.(output|down)\.output": [[Replicate()]],
    },
}


class Tokens:
    """Samples that need no file: a walk over the vocabulary that is easy to learn."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        walk = (index * 7 + torch.arange(CONTEXT + 1) * (1 + index % 3)) % VOCABULARY
        return walk[:-1], walk[1:]


def loss_fn(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(dropout=0.0, layers=LAYERS):
    torch.manual_seed(3)
    return GPT(dropout, layers)


def groups(model):
    """Decay for matrices only, as is usual."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
