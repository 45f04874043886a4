"""Plans that are proposed: which keys, for which models, and why; on the meta device, without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.train import models
from vescale_train.plan import Interleaved, Names, Replicate, Shard, estimate, resolve
from vescale_train.planner import explain, propose

ROWS, COLUMNS, WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)


def proposed(model, num_ranks, **options):
    """Return the placements by name; the plan must fit without a problem."""
    plan = propose(model, num_ranks, **options)
    resolved = resolve(plan, Names.of(model), num_ranks)
    assert resolved.report.problems == ()
    assert all(plan.why.get(key) for key in (*plan.parameter, *plan.forward))
    return plan, resolved


@pytest.fixture(autouse=True)
def meta():
    with torch.device("meta"):
        yield


def test_llama_is_cut_by_its_family():
    plan, resolved = proposed(models.make("llama"), 2)
    cut = resolved.parameters
    assert cut["model.layers.1.self_attn.k_proj.weight"] == ROWS
    assert cut["model.layers.0.self_attn.o_proj.weight"] == COLUMNS
    assert cut["model.layers.0.mlp.down_proj.weight"] == COLUMNS
    assert cut["lm_head.weight"] == cut["model.embed_tokens.weight"] == ROWS
    assert "model.norm.weight" not in cut
    assert resolved.edges["model.layers.1.mlp.input"] == (WHOLE,)
    assert "model\\.layers\\.\\d+\\.self_attn\\.o_proj\\.weight: rows: its family says rows" in explain(plan)


def test_heads_of_keys_that_cannot_be_shared_out_stay_whole_and_the_rest_is_cut():
    plan, resolved = proposed(models.make("llama"), 4)
    assert "model.layers.0.self_attn.k_proj.weight" not in resolved.parameters
    assert resolved.parameters["model.layers.0.self_attn.q_proj.weight"] == ROWS
    assert "whole: 2 heads of keys cannot be shared out among 4 ranks" in explain(plan)


def test_heads_that_cannot_be_shared_out_leave_attention_whole():
    model = models.make("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=36)
    plan, resolved = proposed(model, 2)
    assert not any("self_attn" in name for name in resolved.parameters)
    assert resolved.parameters["model.layers.0.mlp.up_proj.weight"] == ROWS
    assert "3 heads cannot be shared out among 2 ranks" in explain(plan)


def test_fused_projections_are_interleaved():
    _, resolved = proposed(models.make("gpt2"), 2)
    assert resolved.parameters["transformer.h.0.attn.c_attn.weight"] == (Interleaved(1, 3),)
    assert resolved.parameters["transformer.h.0.attn.c_proj.weight"] == ROWS
    assert resolved.parameters["transformer.h.0.mlp.c_fc.bias"] == ROWS
    assert resolved.parameters["transformer.wte.weight"] == ROWS


def test_the_residual_stream_is_shared_out_along_the_sequence_where_it_is_known():
    _, resolved = proposed(models.make("bert"), 2, sequence=True)
    assert resolved.edges["bert.embeddings.output"] == (COLUMNS,)
    assert resolved.edges["bert.encoder.output"] == (WHOLE,)
    assert resolved.edges["bert.encoder.layer.0.output.dense.output"] == (COLUMNS,)
    assert resolved.edges["bert.encoder.layer.1.attention.self.input"] == (WHOLE,)


class Block(nn.Module):
    """Layers with names that nobody knows."""

    def __init__(self, *sizes):
        super().__init__()
        for number, (inputs, outputs) in enumerate(sizes):
            self.add_module(f"part{number}", nn.Linear(inputs, outputs))

    def forward(self, x):
        return x


def test_siblings_are_told_apart_by_their_shapes():
    model = nn.ModuleDict(
        {
            "up and down": Block((8, 32), (8, 32), (32, 8)),
            "fused": Block((8, 24), (8, 8)),
            "four": Block((8, 8), (8, 4), (8, 4), (8, 8)),
            "two squares": Block((8, 8), (8, 8)),
            "one": Block((8, 32)),
            "torch": nn.MultiheadAttention(8, 2),
        }
    )
    _, resolved = proposed(model, 2)
    cut = {name: placements for name, placements in resolved.parameters.items() if name.endswith("weight")}
    assert cut == {
        "up and down.part0.weight": ROWS,
        "up and down.part1.weight": ROWS,
        "up and down.part2.weight": COLUMNS,
        "fused.part0.weight": (Interleaved(0, 3),),
        "fused.part1.weight": COLUMNS,
        "four.part0.weight": ROWS,
        "four.part1.weight": ROWS,
        "four.part2.weight": ROWS,
        "four.part3.weight": COLUMNS,
    }


def test_nothing_is_cut_for_one_rank_or_where_nothing_can_be():
    assert propose(models.make("llama"), 1).parameter == {}
    plan, resolved = proposed(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)), 16)
    assert resolved.parameters == {}
    assert "it is narrower than 16 ranks" in explain(plan)


def test_overrides_win_and_are_explained():
    over = {"parameter": {r"model\.layers\.0\.mlp\..*": [Replicate()]}}
    plan, resolved = proposed(models.make("llama"), 2, overrides=over)
    assert resolved.parameters["model.layers.0.mlp.up_proj.weight"] == WHOLE
    assert resolved.parameters["model.layers.1.mlp.up_proj.weight"] == ROWS
    assert r"model\.layers\.0\.mlp\..*: asked for" in explain(plan)


@pytest.mark.parametrize("name", models.MAKERS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_most_of_a_known_model_is_cut(name, num_ranks):
    model = models.make(name, **({"num_key_value_heads": 4} if name == "llama" else {}))
    names = Names.of(model)
    _, resolved = proposed(model, num_ranks)
    assert estimate(resolved, names, num_ranks).share < 1.4 / num_ranks
