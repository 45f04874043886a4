from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_train.pipe.errors import SplitError
from vescale_train.pipe.ties import find_ties


def three(tie):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    if tie:
        model[2].weight = model[0].weight
    return model


def everywhere(name):
    return [0, 1, 2]


def nowhere_else(name):
    return [0]


def stages_of(name):
    return [int(name[0])]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_parameter_under_two_names_is_a_tie(device):
    with torch.device(device):
        (tie,) = find_ties(three(tie=True), stages_of)
        assert (tie.names, tie.stages, tie.name_on) == (("0.weight", "2.weight"), (0, 2), ("0.weight", "2.weight"))
        assert not find_ties(three(tie=False), stages_of)


def test_two_parameters_over_one_memory_are_a_tie():
    model = three(tie=False)
    model[2].weight = nn.Parameter(model[0].weight.detach())
    assert [tie.names for tie in find_ties(model, stages_of)] == [("0.weight", "2.weight")]


def test_empty_parameters_have_no_memory_to_go_by():
    model = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.empty(0))]) for _ in range(2)])
    assert not find_ties(model, stages_of)


def test_within_a_stage_there_is_nothing_to_do():
    assert not find_ties(three(tie=True), nowhere_else)


def test_a_parameter_of_the_model_itself_is_on_all_stages():
    (tie, *_) = find_ties(three(tie=False), everywhere)
    assert tie.stages == (0, 1, 2)
    assert len(set(tie.name_on)) == 1


def test_declared_groups_join_those_found():
    (tie,) = find_ties(three(tie=True), stages_of, [("1.weight", "2.weight")])
    assert tie.stages == (0, 1, 2)
    for group, reason in [(("1.weight", "x"), "no such parameters"), (("1.weight", "1.bias"), "different shapes")]:
        with pytest.raises(SplitError, match=reason):
            find_ties(three(tie=False), stages_of, [group])
