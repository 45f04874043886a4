"""Layouts that are chosen for a world and a memory, and the reasons given."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train import models
from vescale_train.errors import ConfigError
from vescale_train.planner import Layout, Machine, search
from vescale_train.planner.cost import Shape, cost_of

with torch.device("meta"):
    LLAMA = models.make(
        "llama",
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=8,
        vocab_size=4096,
    )
NUM = sum(p.numel() for p in LLAMA.parameters())
ENOUGH = 2**40


def test_with_room_for_all_replicas_share_out_nothing():
    choice = search(LLAMA, 4, ENOUGH, tokens=2**16)
    assert choice.layout == Layout(dp=4, tp=1, zero=0, ac=False)
    assert choice.cost.parameter_bytes == choice.cost.gradient_bytes == 4 * NUM
    assert choice.cost.optimizer_bytes == 8 * NUM
    assert len(choice.weighed) == 2 * (4 + 4 + 1)
    assert "the fastest of 18 that fit, of 18" in choice.why


def test_less_memory_brings_sharing_out_and_then_checkpointing():
    tokens = 2**14
    whole = search(LLAMA, 4, ENOUGH, tokens=tokens)
    tight = search(LLAMA, 4, whole.cost.memory_bytes - 1, tokens=tokens)
    assert tight.layout != whole.layout
    assert tight.cost.memory_bytes < whole.cost.memory_bytes
    assert f"{whole.layout} would come first, but needs" in tight.why
    least = min(cost.memory_bytes for _, cost in whole.weighed)
    smallest = search(LLAMA, 4, least, tokens=tokens)
    assert smallest.cost.memory_bytes == least
    assert smallest.layout.ac
    with pytest.raises(ConfigError, match=r"nothing fits: of 18 layouts of 4 ranks, .* needs least"):
        search(LLAMA, 4, least - 1, tokens=tokens)


@pytest.mark.parametrize("fixed", [{"tp": 2}, {"zero": 3}, {"ac": True}, {"dp": 2, "zero": 1, "ac": False}])
def test_what_was_decided_stays(fixed):
    choice = search(LLAMA, 4, ENOUGH, tokens=1024, fixed=fixed)
    assert all(getattr(layout, name) == value for layout, _ in choice.weighed for name, value in fixed.items())
    assert "as asked" in choice.why


def test_a_whole_layout_may_be_fixed_and_an_impossible_one_is_refused():
    wanted = Layout(dp=2, tp=2, zero=2, ac=True)
    assert search(LLAMA, 4, ENOUGH, tokens=1024, fixed=wanted).layout == wanted
    with pytest.raises(ConfigError, match="dp x tp must be 4"):
        search(LLAMA, 4, ENOUGH, tokens=1024, fixed={"tp": 3})
    with pytest.raises(ConfigError, match="cannot fix \\['pp'\\]"):
        search(LLAMA, 4, ENOUGH, tokens=1024, fixed={"pp": 2})


def test_slow_links_bring_fewer_sums_of_activations_and_few_tokens_bring_more():
    slow = Machine(link_bytes_per_second=1e9)
    assert search(LLAMA, 8, ENOUGH, tokens=2**20, machine=slow).layout.tp == 1
    assert search(LLAMA, 8, ENOUGH, tokens=8, machine=slow).layout.tp > 1


def test_heads_that_do_not_divide_are_named():
    with torch.device("meta"):
        model = models.make("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=36)
    why = search(model, 2, ENOUGH, tokens=1024, fixed={"tp": 2}).why
    assert "3 heads do not divide by tp=2" in why


SHAPES = {tp: Shape.of(LLAMA, tp) for tp in (1, 2, 4, 8)}


@settings(deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(1, 8),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 2**16),
    st.sampled_from([2, 4]),
)
def test_costs_are_ordered_as_they_must_be(tp, dp, zero, ac, tokens, item_bytes):
    def cost(**changed):
        layout = Layout(**{"dp": dp, "tp": tp, "zero": zero, "ac": ac, **changed})
        return cost_of(SHAPES[layout.tp], layout, tokens=tokens, item_bytes=item_bytes, machine=Machine())

    here = cost()
    assert cost(zero=min(zero + 1, 3)).memory_bytes <= here.memory_bytes
    assert cost(ac=True).activation_bytes <= here.activation_bytes
    assert cost(ac=True).compute_seconds >= here.compute_seconds
    assert cost(tp=8).parameter_bytes <= here.parameter_bytes
    assert here.memory_bytes >= 0
    assert math.isfinite(here.seconds)
    if tp == dp == 1:
        assert here.exchange_seconds == 0
