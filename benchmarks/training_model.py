"""A GPT that trains: small, in plain torch, with the shapes of ``states.gpt_shapes``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.states import num_layers

if TYPE_CHECKING:
    from benchmarks.case import Scale

_HEADS = 4
_BATCH, _LENGTH = 2, 64


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        """Return the block's output."""
        parts = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """A GPT whose head is its embedding."""

    def __init__(self, width: int, layers: int, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(_LENGTH, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> scalar
        """Return the loss of predicting each next token."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A model, its AdamW, and steps on noise."""

    def __init__(self, scale: Scale) -> None:
        torch.manual_seed(0)
        width = min(scale.width, 512)
        vocab_size = min(scale.vocab_size, 8192)
        self.model = GPT(width, num_layers(scale.training_bytes, width, vocab_size, _LENGTH), vocab_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self._tokens = torch.randint(vocab_size, (_BATCH, _LENGTH))

    def step(self) -> None:
        """Do one step of training."""
        loss = self.model(self._tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
