"""A GPT in the size classes of nanoGPT, in plain torch: this file knows nothing of ranks, layouts or checkpoints.

Two choices make it easy to cut: queries, keys and values are three matrices and not one (so that each can be cut by
heads), and the forward pass asks for no global width (so that it runs as well on a part of the heads).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The numbers that fix a GPT's shapes."""

    num_layers: int
    num_heads: int
    width: int
    context: int
    """The longest sequence, in tokens."""
    vocab_size: int

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} cannot be cut into {self.num_heads} heads of equal size")

    @classmethod
    def of_size(cls, name: str, vocab_size: int) -> GPTConfig:
        """Return the configuration of a size class: a key of ``SIZES``."""
        if name not in SIZES:
            raise ValueError(f"there is no size class {name!r}; choose one of {', '.join(SIZES)}")
        num_layers, num_heads, width, context = SIZES[name]
        return cls(num_layers=num_layers, num_heads=num_heads, width=width, context=context, vocab_size=vocab_size)


SIZES = {
    "tiny": (2, 4, 64, 32),
    "small": (2, 4, 128, 64),
    "cpu": (4, 4, 128, 64),  # nanoGPT's settings for a laptop without a GPU
    "baby": (6, 6, 384, 256),  # nanoGPT's character model for one GPU
    "gpt2": (12, 12, 768, 1024),
    "gpt2-medium": (24, 16, 1024, 1024),
    "gpt2-large": (36, 20, 1280, 1024),
    "gpt2-xl": (48, 25, 1600, 1024),
}
"""Name -> layers, heads, width, context."""


class Attention(nn.Module):
    """Causal self-attention over however many heads its weights hold."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] -> the same
        """Mix each position with those before it."""
        batch, time, _ = x.shape
        heads = (batch, time, -1, self.head_width)  # -1: under tensor parallelism a rank holds some of the heads
        query, key, value = (linear(x).view(heads).transpose(1, 2) for linear in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    """The position-wise half of a block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """One layer: attention, then MLP, each behind a norm and beside a residual path."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's input."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Predicts the next token at every position; the token embedding is also the output matrix (tied weights)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()
        self.tie_weights()

    def forward(self, tokens: Tensor) -> Tensor:  # int64[batch, time] -> float32[batch, time, vocab]
        """Return the logits of the token that follows each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def tie_weights(self) -> None:
        """Make the output matrix the same parameter as the token embedding; needed again once both were cut."""
        self.head.weight = self.token.weight

    def _initialise(self) -> None:
        """Draw the weights as GPT-2 does: narrower where a residual path adds up over the layers."""
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else INIT_STD)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all positions of all samples, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
