"""What a right plan says of each name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.train.plan.net import NAMES
from vescale_train.plan import Interleaved, Plan, Replicate, Shard, check, resolve

GOOD = {
    "parameter": {
        r"words\.weight": [Shard(0)],
        r"layers\.\d+\.(gate|up)_proj\.(weight|bias)": [Shard(0)],
        r"layers\.\d+\.down_proj\.weight": [Shard(-1)],
    },
    "forward": {r"layers\.\d+\.input": [[Replicate()]], r"layers\.\d+\.output": [Shard(1)], "input": [None]},
}


def test_names_are_placed_and_the_rest_is_replicated():
    resolved = resolve(Plan.of(GOOD), NAMES, 4)
    assert resolved.report.problems == ()
    assert set(resolved.parameters) == {
        "words.weight",
        *(f"layers.{n}.{p}_proj.weight" for n in range(3) for p in ("gate", "up", "down")),
        *(f"layers.{n}.up_proj.bias" for n in range(3)),
    }
    assert resolved.edges["layers.2.output"] == ((Shard(1),),)
    assert resolved.edges["input"] == (None,)
    assert set(resolved.report.replicated) == {
        "kinds.weight",
        "norm.weight",
        "norm.bias",
        *(f"layers.{n}.down_proj.bias" for n in range(3)),
    }
    text = str(resolved.report)
    assert "parameter['words\\\\.weight'] -> [Shard(0)]: words.weight" in text
    assert "named by no key, so replicated: kinds.weight" in text


def test_any_name_of_a_tied_parameter_will_do():
    assert resolve(Plan.of({"parameter": {"head.weight": [Shard(0)]}}), NAMES, 2).parameters == {
        "words.weight": (Shard(0),)
    }


def test_overrides_win_and_make_no_ambiguity():
    plan = Plan.of(GOOD).overridden(
        {"parameter": {r"layers\.1\.up_proj\.weight": [Replicate()], ".*bias": [Replicate()]}}
    )
    resolved = resolve(plan, NAMES, 4)
    assert resolved.report.problems == ()
    assert resolved.parameters["layers.1.up_proj.weight"] == (Replicate(),)
    assert resolved.parameters["layers.0.up_proj.weight"] == (Shard(0),)
    assert resolved.parameters["layers.0.up_proj.bias"] == (Replicate(),)
    again = plan.overridden({"parameter": {r"layers\.1\.up_proj\.weight": [Shard(1)]}})
    assert resolve(again, NAMES, 4).parameters["layers.1.up_proj.weight"] == (Shard(1),)
    assert plan.overridden(None) is plan


@given(st.integers(1, 40), st.integers(0, 1), st.integers(1, 6))
def test_a_parameter_is_refused_just_when_a_rank_would_hold_nothing_or_parts_differ(num_ranks, dim, parts):
    length = (40, 8)[dim]
    placement = Interleaved(dim, parts) if parts > 1 else Shard(dim)
    found = check({"words.weight": (placement,)}, {}, NAMES, num_ranks)
    assert bool(found) == (length % parts != 0 or length // parts < num_ranks)
