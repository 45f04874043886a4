"""What two ranks do: functions and layers on cut tensors, against the same on whole ones; edges; what may go wrong."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.train import models
from tests.train.compare import apart, gradients, run, whole
from vescale_train.dmodule import DModule, apply, attached, is_dmodule, parallelize_module
from vescale_train.dmodule.region import ExactRegion, Region
from vescale_train.dmodule.rules import RULES
from vescale_train.errors import ConfigError, PlanError, StateError
from vescale_train.mesh import init
from vescale_train.plan import Interleaved, Replicate, Shard

ROWS, COLUMNS, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]
X, W, B = (5, 4, 12), (18, 12), (18,)
TARGETS = (torch.arange(20) % 12).masked_fill(torch.arange(20) < 7, -100)
SOFT = torch.linspace(0, 1, 48).view(4, 12).softmax(-1)
IDS = torch.tensor([[0, 3, 17], [9, 8, 3]])


def _placed(x):
    room = torch.zeros(5, 4, 12)
    room[:, 1:] = x[:, 1:]
    return room * 2


CALLS = {
    "linear": (functional.linear, (X, W, B)),
    "linear without bias": (functional.linear, (X, W)),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w.t().contiguous()), (B, (20, 12), W)),
    "addmm as it is stored": (torch.addmm, ((18,), (20, 12), (12, 18))),
    "matmul": (lambda x, w: x @ w.t(), (X, W)),
    "embedding": (lambda w: functional.embedding(IDS, w), (W,)),
    "embedding with padding": (lambda w: functional.embedding(IDS, w, padding_idx=-1), (W,)),
    "embedding of fewer rows than ranks": (lambda w: functional.embedding(IDS.clamp(max=0), w), ((1, 12),)),
    "softmax": (lambda x: x.softmax(-1), (X,)),
    "log softmax and pick": (lambda x: functional.cross_entropy(x.flatten(0, 1), torch.arange(20) % 12), (X,)),
    "cross entropy that ignores tokens": (lambda x: functional.cross_entropy(x.flatten(0, 1), TARGETS), (X,)),
    "cross entropy with weights": (
        lambda x: functional.cross_entropy(x.flatten(0, 1), TARGETS, torch.arange(12) + 1.0, label_smoothing=0.1),
        (X,),
    ),
    "cross entropy of each": (lambda x: functional.cross_entropy(x.flatten(0, 1), TARGETS, reduction="none"), (X,)),
    "cross entropy in its old form": (lambda x: functional.cross_entropy(x[0], TARGETS[:4], size_average=False), (X,)),
    "cross entropy with shares": (lambda x: functional.cross_entropy(x[0], SOFT), (X,)),
    "likelihood": (lambda x: functional.nll_loss(x.log_softmax(-1).flatten(0, 1), TARGETS), (X,)),
    "norm": (lambda x, w, b: functional.layer_norm(x, (12,), w, b), (X, (12,), (12,))),
    "mean": (lambda x: (x - x.mean(-1, keepdim=True)).pow(2).mean((0, 2)), (X,)),
    "masked": (lambda x: x.masked_fill(torch.ones(4, 12).triu(1).bool(), 0.0).cumsum(1), (X,)),
    "joined with what is made here": (lambda x: torch.cat([x * torch.arange(12.0), torch.ones(5, 4, 2)], -1), (X,)),
    "pieces": (lambda x: torch.stack([a * (i + 1) for i, a in enumerate(x.split(4, dim=-1))]), (X,)),
    "pieces by number": (lambda x: sum(a * (i + 1) for i, a in enumerate(x.chunk(3, dim=-1))), (X,)),
    "pieces of other sizes": (lambda x: x.split([2, 10], dim=-1)[1].exp(), (X,)),
    "views that cut a cut dim": (lambda x: x.view(5, 4, 3, 4).transpose(1, 2).reshape(5, 3, 16).sin(), (X,)),
    "odd views": (lambda x: x.reshape(4, 5, 12).view(2, 2, 60).tanh(), (X,)),
    "indices": (lambda x: x[:, 1:3, ::2] + x[:, [0, 3]][..., :6], (X,)),
    "gather": (lambda x: x.gather(-1, torch.arange(20).view(5, 4, 1) % 12), (X,)),
    "largest": (lambda x: torch.topk(x, 3, dim=-1).values + x.max(-1, keepdim=True).values, (X,)),
    "sorted": (lambda x: x.sort(-1).values * x.flip(0), (X,)),
    "einsum": (lambda x, w: torch.einsum("btc,oc->bto", x, w), (X, W)),
    "two sums": (lambda x: x.sum() + x.sum(0).sum() + 10 + torch.tensor(10.0), (X,)),
    "a number read": (lambda x: x * x.sum().item(), (X,)),
    "truth": (lambda x: x if bool((x * 0).sum() == 0) else x * 2, (X,)),
    "padding": (lambda x: functional.pad(x, (1, 2)).roll(1, -1), (X,)),
    "convolution": (lambda x, w: functional.conv1d(x, w.view(6, 4, 9)), (X, W)),
    "written to": (lambda x: torch.zeros(5, 4, 12).add_(x).mul_(x), (X,)),
    "written at a place": (_placed, (X,)),
    "taken apart": (lambda x: x.unbind(-1)[3] * torch.unbind(x, 1)[0][:, :1].squeeze(-1).unsqueeze(-1), (X,)),
    "whitened": (lambda x: torch.linalg.norm(x, dim=-1, keepdim=True) + x, (X,)),
}


def cuts(num_tensors, ndims):
    """Yield some ways to cut tensors: one of them along each of its dims, then all along their first, and last, dim."""
    for which in range(num_tensors):
        for dim in range(ndims[which]):
            yield [dim if one == which else None for one in range(num_tensors)]
    yield [0] * num_tensors
    yield [ndim - 1 for ndim in ndims]


def functions(mesh):
    """Return, for every function and mode, the largest difference in values and gradients over all ways to cut."""
    found = {}
    for name, (call, shapes) in CALLS.items():
        torch.manual_seed(1)
        values = [torch.randn(shape) for shape in shapes]
        wanted = _run(call, [value.clone().requires_grad_() for value in values], None)
        for mode, region in (("fast", Region(mesh, RULES)), ("exact", ExactRegion())):
            worst = 0.0
            for dims in cuts(len(values), [value.ndim for value in values]):
                cut = [
                    value.clone() if dim is None else distribute_tensor(value, mesh, [Shard(dim)])
                    for value, dim in zip(values, dims, strict=True)
                ]
                got = _run(call, [one.detach().requires_grad_() for one in cut], region)
                worst = max(worst, *(_apart(a, b) for a, b in zip(got, wanted, strict=True)))
                if mode == "exact":
                    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (name, dims)
            found[f"{name}, {mode}"] = worst
    return found


def _apart(here, there):
    return float((here - there).abs().max() / there.abs().max().clamp(min=1e-3))


def _run(call, values, region):
    if region is None:
        out = call(*values)
    else:
        with region:
            out = call(*values)
    out = whole(out)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(whole(value.grad).detach() for value in values)]


def attention(mesh):
    """Return how far attention is from one device's, over numbers of heads, masks and cuts."""
    found = {}
    for num_queries, num_keys in ((4, 4), (4, 2), (4, 1), (3, 3), (6, 3)):
        for masked in ("none", "causal", "all heads", "each head", "learned"):
            torch.manual_seed(2)
            q, k, v = (torch.randn(2, n, 5, 6) for n in (num_queries, num_keys, num_keys))
            bias = torch.randn(num_queries, 5, 5)[None].expand(2, -1, -1, -1).contiguous()
            mask = {
                "none": None,
                "causal": None,
                "all heads": bias[:, :1] > 0.5,
                "each head": bias,
                "learned": bias[:1, :1],
            }[masked]
            mask = mask.clone() if mask is not None else None
            if masked == "all heads":
                mask |= torch.eye(5, dtype=torch.bool)

            def call(q, k, v, *more, mask=mask, masked=masked, gqa=num_keys != num_queries):
                own = more[0] if more else mask
                return functional.scaled_dot_product_attention(
                    q, k, v, own, is_causal=masked == "causal", enable_gqa=gqa
                )

            values = [q, k, v, *([mask] if masked == "learned" else [])]
            wanted = _run(call, [value.clone().requires_grad_() for value in values], None)
            worst = 0.0
            for dims in ((1, 1, 1), (1, None, None), (None, 1, None), (0, 0, 0), (3, 3, 3), (1, 2, 1)):
                cut = [
                    distribute_tensor(value, mesh, [Replicate() if dim is None else Shard(dim)])
                    for value, dim in zip(values, dims, strict=False)
                ]
                got = _run(
                    call,
                    [
                        *(one.detach().requires_grad_() for one in cut),
                        *(one.clone().requires_grad_() for one in values[3:]),
                    ],
                    Region(mesh, RULES),
                )
                worst = max(worst, *(_apart(a, b) for a, b in zip(got, wanted, strict=True)))
            found[f"{num_queries} heads of {num_keys}, mask: {masked}"] = worst
    return found


class Odd(nn.Module):
    """Keyword arguments, tuples, mappings, a failure, a checkpointed part, parameters of its own."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 15)
        self.down = nn.Linear(15, 6)
        self.norm = nn.LayerNorm(6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x, *, fail=False, rerun=False):
        if fail:
            raise KeyError("asked for")
        block = self._block
        x = checkpoint(block, x, use_reentrant=False) if rerun else block(x)
        attended, _ = self.attend(x, x, x, need_weights=False)
        self.seen += x.detach().mean((0, 1))
        return {"out": attended * self.scale, "both": (x, self.norm(x))}

    def _block(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


ODD_PLAN = {
    "parameter": {
        r"up\.(weight|bias)": ROWS,
        r"down\.weight": COLUMNS,
        r"attend\.in_proj_(weight|bias)": [Interleaved(0, 3)],
    },
    "forward": {
        r"norm\.input": [COLUMNS],
        r"up\.input": {"input": WHOLE},
        r"down\.output": [COLUMNS],
        r"attend\.input": {"query": WHOLE, "key": WHOLE, "value": WHOLE},
        r"output": {"out": ROWS},
        r"scale": [WHOLE],
        r"attend\.out_proj\.weight": [ROWS],
    },
}


def odd_loss(output):
    x, normed = output["both"]
    return output["out"].pow(2).mean() + (x * normed).mean()


def modules(mesh):
    """Return how far a module with everything in it is from one device, and what it does when things go wrong."""
    torch.manual_seed(4)
    alone = Odd()
    x = torch.randn(2, 5, 6)
    wanted = run(alone, (x,), odd_loss)
    found = {}
    for mode in ("fast", "exact"):
        model = apply(copy.deepcopy(alone).train(), mesh, ODD_PLAN, exact=mode == "exact")
        found[mode] = apart(wanted, run(model, (x,), odd_loss))
        found[f"{mode}, checkpointed"] = apart(wanted, run(model, {"x": x, "rerun": True}, odd_loss))
        try:
            model(x, fail=True)
        except KeyError:
            found[f"{mode}, after a failure"] = apart(wanted, run(model, (x,), odd_loss))
        for _ in range(2):
            odd_loss(model(x)).backward()
        twice = {name: g / 2 for name, g in gradients(model).items()}
        model.zero_grad(set_to_none=True)
        found[f"{mode}, two micro-batches"] = apart(wanted, (wanted[0], twice))
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
        found[f"{mode}, a copy"] = apart(wanted, run(copied, (x,), odd_loss))
        assert attached(model).exact == (mode == "exact")
    return found


def checkpointed(mesh):
    """Return how far a model of Hugging Face is from one device when it runs its blocks again in backward."""
    inputs = models.batch()
    wanted = run(models.make("llama"), inputs)
    found = {}
    for name, plan in (("plain", models.LLAMA_PLAN), ("sequence", models.LLAMA_SEQUENCE_PLAN)):
        model = apply(models.make("llama"), mesh, plan)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        found[name] = apart(wanted, run(model, inputs))
    return found


def refusals(mesh):
    """Return what is said to those who do it wrong."""
    said = {}

    def note(name, call, error):
        try:
            call()
        except error as caught:
            said[name] = str(caught)

    model = DModule(nn.Linear(4, 4), mesh)
    assert is_dmodule(model)
    assert all(isinstance(one, DTensor) for one in model.parameters())
    note("twice", lambda: apply(model, mesh, {}), StateError)
    note("a DTensor", lambda: apply(nn.Sequential(model), mesh, {}), StateError)
    note("a plan", lambda: apply(nn.Linear(4, 4), mesh, {"parameter": {"weigth": ROWS}}), PlanError)
    note("not asked", lambda: attached(nn.Linear(1, 1)), StateError)
    many = apply(nn.Identity(), mesh, {"forward": {"output": [WHOLE, WHOLE]}})
    note("values", lambda: many((torch.ones(1),)), PlanError)
    note("a number", lambda: many((torch.ones(1), 2)), PlanError)
    note("factories", lambda: parallelize_module(nn.Linear(1, 1), mesh, {}, factory={"": {}}), ConfigError)
    two = init(dp=1, fsdp=2)
    note("axes", lambda: parallelize_module(nn.Linear(1, 1), two, {}), ConfigError)
    other = parallelize_module(nn.Linear(4, 4), two["fsdp"], {"parameter": {"weight": ROWS}})
    assert other.weight.to_local().shape == (2, 4)
    plain = apply(nn.Linear(4, 4), two, {"parameter": {"weight": ROWS}})
    assert not isinstance(plain.weight, DTensor)
    with torch.device("meta"):
        empty = nn.Linear(4, 6)
    apply(empty, mesh, {"parameter": {"weight": ROWS}})
    assert empty.weight.to_local().is_meta
    assert empty.weight.to_local().shape == (3, 4)
    return said


def main():
    torch.set_num_threads(1)
    mesh = init(tp=dist.get_world_size())
    return {
        "functions": functions(mesh),
        "attention": attention(mesh),
        "modules": modules(mesh),
        "checkpointed": checkpointed(mesh),
        "refusals": refusals(mesh),
    }
