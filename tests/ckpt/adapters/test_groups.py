from __future__ import annotations

import re

import pytest
import torch

from vescale_ckpt.adapters.groups import is_switched, match_groups, parse_group
from vescale_ckpt.adapters.names import names_node
from vescale_ckpt.state.tree import DictNode, ListNode, TensorNode, ValueNode


def group(index, names, **options):
    items = [("params", names_node(names)), *((key, ValueNode(value)) for key, value in options.items())]
    return parse_group(index, DictNode(tuple(items)))


def matched(stored, target):
    matching = match_groups([group(i, names) for i, names in enumerate(stored)], target)
    return [found and found.index for found in matching.groups], dict(matching.problems)


def test_a_group_is_parsed_with_every_option_but_its_names():
    found = group(3, ["a", "b"], lr=0.1, tag="x", param_names=None)
    assert (found.index, found.names) == (3, ("a", "b"))
    assert found.options == {"lr": ValueNode(0.1), "tag": ValueNode("x")}


@pytest.mark.parametrize(
    "node",
    [
        ValueNode(1),
        DictNode(()),
        DictNode((("params", ListNode((ValueNode(0), ValueNode(1)))),)),
        DictNode((("params", TensorNode()),)),
    ],
)
def test_a_group_without_names_is_none(node):
    assert parse_group(0, node) is None


def test_a_list_of_names_is_read_too():
    assert parse_group(0, DictNode((("params", ListNode((ValueNode("a"),))),))).names == ("a",)


@pytest.mark.parametrize(
    ("stored", "target", "expected"),
    [
        ([["a", "b"], ["c"]], [["a", "b"], ["c"]], [0, 1]),
        ([["a", "b"], ["c"]], [["c"], ["b", "a"]], [1, 0]),
        ([["a"], ["b"], [], ["c"]], [["a"], ["b"], [], ["c"]], [0, 1, 2, 3]),
        ([["a"], [], ["b"]], [[], ["a"], ["b"]], [1, 0, 2]),
        ([[], ["a"], []], [[], ["a"], []], [0, 1, 2]),
        ([["a", "b", "c"]], [["b"]], [0]),  # a stage holds a part
        ([["a"], ["b"]], [["a"], []], [0, 1]),  # and of some groups nothing
        ([["a"], ["b"]], [None, ["b"]], [None, 1]),
        ([], [], []),
    ],
)
def test_groups_are_matched_by_the_names_in_them(stored, target, expected):
    assert matched(stored, target) == (expected, {})


@pytest.mark.parametrize(
    ("stored", "target", "index", "reason"),
    [
        ([["a"], ["b"]], [["a", "b"]], 0, r"in one group .* groups 0 \(with 'a'\), 1 \(with 'b'\)"),
        ([["a", "b"]], [["a"], ["b"]], 1, "in groups 0 and 1 .* its group 0"),
        ([["a"]], [["a"], []], 1, "an empty group"),
    ],
)
def test_merged_split_and_lost_groups_are_problems(stored, target, index, reason):
    _, problems = matched(stored, target)
    assert list(problems) == [index]
    assert re.search(reason, problems[index])


@pytest.mark.parametrize(
    ("options", "expected"), [({"fused": True}, True), ({"capturable": 1}, True), ({"fused": None}, False), ({}, False)]
)
def test_where_steps_are_counted(options, expected):
    assert group(0, [], **options).steps_on_device is expected


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"amsgrad": True}, True),
        ({"amsgrad": False}, False),
        ({"lr": 0.0}, False),
        ({"foreach": None}, False),
        ({"fused": True}, True),
    ],
)
def test_what_switches_state_on_or_off(stored, expected):
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
    assert is_switched(group(0, [], **stored), optimizer) is expected


def test_momentum_is_a_switch_though_it_is_a_number():
    optimizer = torch.optim.SGD([torch.zeros(1)], momentum=0.9)
    assert is_switched(group(0, [], momentum=0.0), optimizer)
    assert not is_switched(group(0, [], momentum=0.5), optimizer)
