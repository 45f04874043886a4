"""A small GPT and its data: odd sizes, a tied head, a frozen and an unused parameter; and how one device trains it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from vescale_train.comm import tree_sum

VOCABULARY, WIDTH, HEADS, LENGTH = 19, 12, 3, 7
MICRO_BATCHES, BATCH = 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of a key's bias is 0 but for rounding
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 30)
        self.down = nn.Linear(30, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(3)
    return GPT().to(dtype)


def micro_batch(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict]:
    """Return two groups, as decay asks for; in each of them are parameters that get no gradient."""
    trained = list(model.parameters())
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, "lr": 2e-3},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2)


def one_device_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, max_norm: float) -> float:
    """Train one step as one device does: gradients of micro-batches by themselves, summed in the fixed tree."""
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    units = [
        torch.autograd.grad(loss_of(model, micro_batch(step, m)), parameters, allow_unused=True)
        for m in range(MICRO_BATCHES)
    ]
    squares = {}
    for name, parameter, *found in zip(names, parameters, *units, strict=True):
        if found[0] is not None:
            parameter.grad = tree_sum(found).div_(MICRO_BATCHES)
            squares[name] = torch.linalg.vector_norm(parameter.grad).square()
    norm = tree_sum([squares[name] for name in sorted(squares)]).sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)
