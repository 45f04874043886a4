"""Small models of the kinds that pipelines have trouble with; each comes with its loss and a minibatch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

VOCAB, WIDTH = 17, 8


class Block(nn.Module):
    """A residual block with a mask that the model hands on."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask=None):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if mask is None else y * mask)


class TiedLM(nn.Module):
    """Embedding and head share a weight; positions are a parameter of the model itself; the output is a dict."""

    def __init__(self, layers=8, frozen=0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(6, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        for block in [*self.blocks[:frozen]]:
            block.requires_grad_(requires_grad=False)

    def forward(self, ids, mask):
        x = self.embed(ids) + self.positions
        for block in self.blocks:
            x = block(x, mask[..., None])
        return {"logits": self.head(self.norm(x)), "hidden": None, "count": ids.shape[0]}


class FrozenFront(nn.Module):
    """Everything but the last blocks is frozen, so early stages have nothing to differentiate."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, VOCAB)
        for part in (self.embed, *self.blocks[:5]):
            part.requires_grad_(requires_grad=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(nn.Module):
    """Late blocks read what early ones gave, and every block gives two tensors."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Pair(WIDTH) for _ in range(4))
        self.up = nn.ModuleList(Pair(2 * WIDTH) for _ in range(4))

    def forward(self, x):
        kept, gate = [], None
        for block in self.down:
            x, gate = block(x)
            kept.append(x)
        for block in self.up:
            x, gate = block(torch.cat([x, kept.pop()], -1), gate)
        return x, (gate, None)


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, WIDTH), nn.Linear(width, WIDTH)

    def forward(self, x, gate=None):
        value = torch.tanh(self.one(x))
        return value if gate is None else value * gate, torch.sigmoid(self.two(x))


def seeded(make):
    torch.manual_seed(3)
    return make()


def ids(batch=16, length=6):
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def language_loss(output, batch):
    logits = output["logits"] if isinstance(output, dict) else output
    return F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten())


def tied():
    mask = (torch.arange(6) % 3 > 0).expand(16, 6).float()
    return seeded(TiedLM), language_loss, {"ids": ids(), "mask": mask}


def frozen_tied():
    model, loss, batch = tied()
    for part in (*model.blocks[:3], model.norm):
        part.requires_grad_(requires_grad=False)
    return model, loss, batch


def frozen_front():
    return seeded(FrozenFront), language_loss, {"ids": ids()}


def skips():
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    return seeded(Skips), lambda output, target: F.mse_loss(output[0] * output[1][0], target), (x, x.flip(1))


def chain():
    def make():
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)])

    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    return seeded(make), nn.MSELoss(), (x, x.flip(1))


MODELS = {"chain": chain, "tied": tied, "frozen and tied": frozen_tied, "frozen front": frozen_front, "skips": skips}
