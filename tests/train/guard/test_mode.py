from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from vescale_train.errors import ConfigError, SilentFaultError
from vescale_train.guard import SilentFaultWarning, exempt, guard
from vescale_train.guard.mode import checks_of
from vescale_train.guard.settings import current, report


def test_plain_tensors_are_left_alone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(3, 4)
    torch.manual_seed(1)
    want = net(x)
    torch.manual_seed(1)
    with guard():
        got = net(x)
        y = torch.zeros(4)
        y[1].fill_(1)
        y[2] = 2
        assert float((y + 1).sum()) == 7
        assert bool(nn.functional.cross_entropy(got, torch.tensor([0, -100, 2]), torch.ones(4)) > 0)
        assert nn.functional.log_softmax(got, 1).shape == (3, 4)
    assert torch.equal(got, want)


def test_a_mode_holds_inside_its_block():
    assert current().mode == "off"
    with guard("warn"):
        with guard("raise"):
            assert current().mode == "raise"
            with guard("off"):
                assert current().mode == "off"
        assert current().mode == "warn"
    assert current().mode == "off"


def test_what_each_mode_does_about_a_fault():
    with guard(), pytest.raises(SilentFaultError, match=r"^S1: x$") as caught:
        report("S1", "x")
    assert caught.value.context == {"fault": "S1"}
    with guard("warn"), pytest.warns(SilentFaultWarning, match=r"^S1: x$"):
        report("S1", "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report("S1", "x")
        with guard("off"):
            report("S1", "x")


def test_an_exempt_fault_is_let_be_and_others_are_not():
    with guard(), exempt("S1", "S2"), exempt("S10"):
        for fault in ("S1", "S2", "S10"):
            report(fault, "x")
        with pytest.raises(SilentFaultError):
            report("S3", "x")
    with exempt("S1"), guard(), guard("warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        report("S1", "x")


def test_there_are_three_modes_and_two_ways_to_read():
    with pytest.raises(ConfigError, match="not 'on' and 'refuse'"), guard("on"):
        pass
    with pytest.raises(ConfigError, match="not 'raise' and 'ask'"), guard(scalar_reads="ask"):
        pass


@pytest.mark.parametrize("name", ["mm", "__eq__", "__init__", "__get__", "backward", "relu", "to"])
def test_most_functions_are_not_looked_at(name):
    assert checks_of(name) == ()


@pytest.mark.parametrize("name", ["add_", "fill_", "copy_", "__iadd__", "__setitem__", "item", "dropout", "add"])
def test_these_are(name):
    assert checks_of(name)
