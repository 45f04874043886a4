"""Plans that people get wrong, and what they are told."""

from __future__ import annotations

import pytest

from tests.train.plan.net import NAMES
from vescale_train.errors import PlanError
from vescale_train.plan import Interleaved, Partial, Plan, Replicate, Shard, resolve

ROWS, WHOLE = [Shard(0)], [Replicate()]


def parameter(**keys):
    return {"parameter": keys}


RESOLVED = {
    "a name misspelt": (
        {"parameter": {r"layers\.\d+\.upp_proj\.weight": ROWS}},
        "unmatched",
        r"matches no name; nearest: 'layers\.0\.up_proj\.weight'",
    ),
    "a prefix that the model does not have": (
        {"parameter": {r"model\.layers\.\d+\.up_proj\.weight": ROWS}},
        "unmatched",
        r"nearest: 'layers\.0\.up_proj\.weight'",
    ),
    "a part of a name": (
        {"parameter": {r"up_proj\.weight": ROWS}},
        "unmatched",
        r"must match the whole name, such as 'layers\.0\.up_proj\.weight'",
    ),
    "a layer too many": ({"parameter": {r"layers\.3\.up_proj\.weight": ROWS}}, "unmatched", "matches no name"),
    "a module for a parameter": ({"parameter": {"words": ROWS}}, "unmatched", r"such as 'words\.weight'"),
    "a shell pattern": ({"parameter": {"*.weight": ROWS}}, "regex", "is no regular expression: nothing to repeat"),
    "an open bracket": ({"parameter": {r"words\.(weight": ROWS}}, "regex", "missing \\)"),
    "an edge that modules do not have": (
        {"forward": {r"norm\.outputs": [WHOLE]}},
        "unmatched",
        r"nearest: 'norm\.output'",
    ),
    "a bias that is not there": ({"parameter": {r"layers\.0\.gate_proj\.bias": ROWS}}, "unmatched", "matches no name"),
    "two keys that disagree": (
        {"parameter": {r"layers\..*\.weight": ROWS, r"layers\.\d+\.down_proj\.weight": [Shard(1)]}},
        "ambiguous",
        r"'layers\.0\.down_proj\.weight' is told two things: .* says \[Shard\(0\)\], .* says \[Shard\(1\)\]",
    ),
    "two keys that agree": (
        {"parameter": {r"layers\.\d+\.up_proj\.weight": ROWS, r"layers\.1\.up_proj\.weight": ROWS}},
        "shadowed",
        "is never used: .* stands before it",
    ),
    "a tie that is cut in two ways": (
        {"parameter": {r"words\.weight": ROWS, r"head\.weight": [Shard(1)]}},
        "tied",
        r"'words\.weight' and 'head\.weight' are one tied parameter",
    ),
    "a dim that a matrix does not have": (
        {"parameter": {r"words\.weight": [Shard(2)]}},
        "shape",
        r"'words\.weight' of shape \(40, 8\) cannot be \[?Shard\(2\)\]?: it has 2 dims; choose one of 0 to 1",
    ),
    "the second dim of a vector": ({"parameter": {r"norm\.weight": [Shard(1)]}}, "shape", "it has 1 dims"),
    "fewer rows than ranks": (
        {"parameter": {r"kinds\.weight": ROWS}},
        "shape",
        "it has 2 along that dim for 4 ranks, and some would hold nothing; cut another dim, or leave it whole",
    ),
    "parts that are not equal": (
        {"parameter": {r"layers\.\d+\.up_proj\.weight": [Interleaved(0, 5)]}},
        "shape",
        "24 is not 5 equal parts",
    ),
    "parts too small for the ranks": (
        {"parameter": {r"layers\.\d+\.up_proj\.weight": [Interleaved(0, 8)]}},
        "shape",
        "each of 8 parts has 3 along that dim for 4 ranks",
    ),
    "placements for two axes": (
        {"parameter": {r"words\.weight": [Replicate(), Shard(0)]}},
        "placement",
        r"is placed as \[Replicate\(\), Shard\(0\)\], over 2 axes",
    ),
    "an edge with placements for two axes": (
        {"forward": {r"norm\.output": [[Shard(0), Shard(1)]]}},
        "placement",
        "over 2 axes",
    ),
    "more values than a forward takes": (
        {"forward": {r"layers\.\d+\.input": [WHOLE, None, WHOLE]}},
        "edge",
        r"'layers\.0\.input' lays out 3 values, but that forward takes x, scale",
    ),
    "an argument that a forward does not take": (
        {"forward": {r"layers\.\d+\.input": {"hidden_states": WHOLE}}},
        "edge",
        "names 'hidden_states', but that forward takes x, scale",
    ),
    "a weight in forward told as several values": (
        {"forward": {r"words\.weight": [WHOLE, WHOLE]}},
        "edge",
        r"'words\.weight' is one tensor",
    ),
    "a weight in forward cut along no dim": ({"forward": {r"words\.weight": [[Shard(5)]]}}, "shape", "it has 2 dims"),
}
UNREADABLE = {
    "terms of a sum as a parameter": ({"parameter": {"w": [Partial()]}}, "a plan cannot hold Partial"),
    "terms of a sum at an edge": ({"forward": {"w.output": [[Partial()]]}}, "a plan cannot hold Partial"),
    "a string for placements": ({"parameter": {"w": "Shard(0)"}}, "cannot read the placements of 'w'"),
    "a number for a placement": ({"parameter": {"w": [0]}}, "want a list such as \\[Shard\\(0\\)\\], got \\[0\\]"),
    "no placement": ({"parameter": {"w": []}}, "cannot read the placements of 'w'"),
    "another part": ({"parameters": {"w": ROWS}}, "parts \\['parameters'\\]: its parts are 'parameter' and 'forward'"),
    "keys that are no strings": ({"parameter": {0: ROWS}}, "want a dict with regexes as keys"),
    "a list of rules": ([("w", ROWS)], "cannot make a plan of list"),
    "an edge that is a string": ({"forward": {"w.input": "Replicate"}}, "cannot read the edge 'w.input'"),
}


@pytest.mark.parametrize("case", RESOLVED)
def test_a_plan_that_does_not_fit_is_refused_with_what_to_do(case):
    plan, kind, said = RESOLVED[case]
    report = resolve(Plan.of(plan), NAMES, 4).report
    assert report.kinds() == {kind}
    with pytest.raises(PlanError, match=said) as caught:
        report.raise_problems()
    assert caught.value.problems == tuple(str(problem) for problem in report.problems)
    report.raise_problems(allow=[kind])


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_plan_is_refused_at_once(case):
    plan, said = UNREADABLE[case]
    with pytest.raises(PlanError, match=said):
        Plan.of(plan)


def test_everything_that_is_wrong_is_said_at_once():
    wrong = [plan for plan, _, _ in RESOLVED.values() if "parameter" in plan]
    merged = {"parameter": {key: value for plan in wrong for key, value in plan["parameter"].items()}}
    report = resolve(Plan.of(merged), NAMES, 4).report
    assert report.kinds() >= {"unmatched", "regex", "ambiguous", "shape", "placement"}
    with pytest.raises(PlanError, match=f"{len(report.problems)} problems"):
        report.raise_problems()
