from __future__ import annotations

import pytest
from torch import nn

from vescale_train.errors import ConfigError
from vescale_train.optim import blocks_of


def model():
    layer = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), "out": nn.Linear(1, 1)})
    return nn.ModuleDict({"embed": nn.Linear(1, 1), "h": nn.ModuleList([layer, nn.Linear(1, 1)])})


def test_blocks_are_the_members_of_outermost_lists():
    assert list(blocks_of(model())) == ["h.0", "h.1"]
    assert blocks_of(nn.Linear(1, 1)) == {}


def test_patterns_match_whole_names():
    assert list(blocks_of(model(), [r"h\.\d", "embed"])) == ["embed", "h.0", "h.1"]


def test_idle_patterns_and_nested_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"\['layers.*'\] match no module"):
        blocks_of(model(), ["layers.*", "embed"])
    with pytest.raises(ConfigError, match="lies inside another"):
        blocks_of(model(), [r"h\.0", r"h\.0\.out"])
