"""Plans as JSON and as hashes."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.errors import PlanError
from vescale_train.plan import Interleaved, Plan, Replicate, Shard, content_hash, from_json, shown, to_json

one_placement = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(-2, 2)),
    st.builds(Interleaved, st.integers(0, 2), st.integers(1, 4)),
)
placements = st.lists(one_placement, min_size=1, max_size=2)
edges = st.one_of(
    st.lists(st.none() | placements, min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=3), placements, max_size=2),
)
plans = st.builds(
    Plan,
    parameter=st.dictionaries(st.text(max_size=5), placements, max_size=3),
    forward=st.dictionaries(st.text(max_size=5), edges, max_size=3),
    why=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)


@given(plans, st.none() | plans)
def test_json_and_back_is_the_same_plan(plan, over):
    plan = plan.overridden(over)
    back = from_json(to_json(plan))
    assert back == plan
    assert back.why == plan.why
    assert content_hash(back) == content_hash(plan)
    function, arguments = plan.__reduce__()  # how it crosses to another process
    assert function(*arguments) == plan
    assert copy.deepcopy(plan) is plan


@given(plans, plans)
def test_hashes_are_equal_just_where_plans_are(one, other):
    same = one == other and all(list(getattr(one, p)) == list(getattr(other, p)) for p in ("parameter", "forward"))
    assert (content_hash(one) == content_hash(other)) == same


def test_reasons_do_not_change_the_hash_and_placements_do():
    plan = Plan(parameter={"w": [Shard(0)]})
    assert content_hash(plan) == content_hash(Plan(parameter={"w": [Shard(0)]}, why={"w": "so"}))
    assert content_hash(plan) != content_hash(Plan(parameter={"w": [Interleaved(0, 3)]}))
    assert len(content_hash(plan)) == 32


def test_a_plan_cannot_be_changed():
    given = {"w": [Shard(0)]}
    plan = Plan(parameter=given)
    given["v"] = [Shard(1)]
    assert dict(plan.parameter) == {"w": (Shard(0),)}
    with pytest.raises(TypeError):
        plan.parameter["v"] = (Shard(1),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "version 1"),
        (json.dumps({"version": 2}), "version 1"),
        (json.dumps({"version": 1}), "exactly parameter, forward, why and overrides"),
        (to_json(Plan()).replace("{}", "[]", 1), "exactly parameter"),
        (to_json(Plan(parameter={"w": [Shard(0)]})).replace('"shard"', '"split"'), "cannot read a placement"),
        (to_json(Plan(parameter={"w": [Shard(0)]})).replace('"dim": 0', '"dim": "0"'), "cannot read a placement"),
    ],
)
def test_what_is_not_written_by_us_is_refused(text, said):
    with pytest.raises(PlanError, match=said):
        from_json(text)


def test_placements_are_shown_as_they_are_written():
    assert shown(((Shard(0),), None, (Interleaved(1, 3),))) == "[[Shard(0)], None, [Interleaved(1, 3)]]"
    assert shown({"x": (Replicate(),)}) == "{'x': [Replicate()]}"
