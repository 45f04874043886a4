"""What the ranks of real worlds do: models under plans that the planner proposed, against the same on one device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.train import models
from tests.train.compare import apart, run
from vescale_train.dmodule import apply
from vescale_train.mesh import init
from vescale_train.planner import propose


class Fused(nn.Module):
    """A transformer of nobody's: one projection for all heads, views with the global number of heads, a fresh mask."""

    def __init__(self, width=16, num_heads=4, vocab=24):
        super().__init__()
        self.num_heads = num_heads
        self.words = nn.Embedding(vocab, width)
        self.places = nn.Embedding(16, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.back = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, tokens, targets):
        batch, time = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(time))
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (one.view(batch, time, self.num_heads, -1).transpose(1, 2) for one in (q, k, v))
        later = torch.ones(time, time, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        x = x + self.back((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, -1))
        x = x + self.mlp(self.norms[1](x)) * self.scale
        logits = functional.linear(x, self.words.weight)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def make(name):
    if name != "fused":
        return models.make(name)
    torch.manual_seed(0)
    return Fused()


def inputs_of(name):
    if name != "fused":
        return models.batch(masked=name != "gpt2")
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(0, 24, (2, 10), generator=generator) for _ in range(2))


def main():
    """Return, for every model, mode and layout of the residual stream, how far it is from one device."""
    torch.set_num_threads(1)
    mesh = init(tp=dist.get_world_size())
    found = {}
    for name in ("llama", "gpt2", "bert", "fused"):
        alone, inputs = make(name), inputs_of(name)
        loss_of = (lambda output: output) if name == "fused" else (lambda output: output.loss)
        wanted = run(alone, inputs, loss_of)
        for sequence in (False, True) if name != "fused" else (False,):
            for exact in (False, True):
                if exact and sequence:
                    continue
                model = make(name)
                plan = propose(model, mesh, sequence=sequence)
                apply(model, mesh, plan, exact=exact)
                case = f"{name}, {'sequence' if sequence else 'plain'}, {'exact' if exact else 'fast'}"
                found[case] = apart(wanted, run(model, inputs, loss_of))
                found[case]["cut"] = sum(p.to_local().numel() for p in model.parameters()) / sum(
                    p.numel() for p in alone.parameters()
                )
                found[case]["dtensors"] = all(isinstance(p, DTensor) for p in model.parameters())
    return found
