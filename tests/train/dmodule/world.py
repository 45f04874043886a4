"""What the ranks of real worlds do: unchanged models under plans written by hand, against the same on one device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.train import models
from tests.train.compare import apart, run
from vescale_train.dmodule import apply
from vescale_train.mesh import init

CASES = {
    "llama": ("llama", models.LLAMA_PLAN, {}),
    "llama, parts of the sequence": ("llama", models.LLAMA_SEQUENCE_PLAN, {}),
    "llama, one head of keys": ("llama", models.LLAMA_PLAN, {"num_key_value_heads": 1}),
    "llama, odd sizes": (
        "llama",
        models.LLAMA_PLAN,
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 36,
            "intermediate_size": 55,
            "vocab_size": 97,
        },
    ),
    "llama, tied": (
        "llama",
        {
            **models.LLAMA_PLAN,
            "parameter": {
                key.replace(r"(model\.embed_tokens|lm_head)", "lm_head"): value
                for key, value in models.LLAMA_PLAN["parameter"].items()
            },
        },
        {"tie_word_embeddings": True},
    ),
    "gpt2": ("gpt2", models.GPT2_PLAN, {}),
    "gpt2, eager attention": ("gpt2", models.GPT2_PLAN, {"attn_implementation": "eager"}),
    "bert": ("bert", models.BERT_PLAN, {}),
}


def compared(mesh, name, plan, changed, inputs, **options):
    """Return how far a parallel model is from one device, and whether its state is as it should be."""
    alone = models.make(name, **changed)
    model = models.make(name, seed=dist.get_rank(), **changed)  # the first rank's values count
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    cls = type(model)
    assert apply(model, mesh, plan, **options) is model
    assert type(model) is cls
    assert dict(model.named_parameters(remove_duplicate=False)).keys() == names
    here = run(model, inputs)
    model(**inputs).loss.backward()
    placed = all(isinstance(p, DTensor) and p.grad.placements == p.placements for p in model.parameters())
    cut = sum(p.to_local().numel() for p in model.parameters()) < sum(p.numel() for p in alone.parameters())
    return {**apart(run(alone, inputs), here), "placed": placed, "cut": cut or mesh.size() == 1}


ON_ALL = ("llama", "gpt2", "bert")
"""The others are run where there is most to cut."""


def unchanged():
    """Return, for the cases and both modes, how far each is from one device."""
    num_ranks = dist.get_world_size()
    mesh = init(tp=num_ranks)
    found = {}
    for case, (name, plan, changed) in CASES.items():
        if num_ranks < 4 and case not in ON_ALL:
            continue
        for exact in (False, True):
            inputs = models.batch(masked=name == "llama" or not exact)
            mode = "exact" if exact else "fast"
            found[f"{case}, {mode}"] = compared(mesh, name, plan, changed, inputs, exact=exact)
    return found


def main():
    torch.set_num_threads(1)
    return unchanged()
