from __future__ import annotations

import dataclasses

import pytest

from vescale_ckpt.errors import ConfigError
from vescale_ckpt.state.per_rank import PerRank, RankPlace


def test_it_holds_a_value_and_stays_as_it_is():
    value = PerRank([1, 2])
    assert value.value == [1, 2]
    assert value == PerRank([1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.value = 3


def test_it_is_resharded_by_a_function_only():
    with pytest.raises(ConfigError, match="'merge'"):
        PerRank(1, reshard="merge")


def test_a_place_is_a_value():
    axes = {"dp": 2}
    place = RankPlace(rank=1, world_size=2, mesh=axes, coordinate={"dp": 1})
    axes["dp"] = 3
    assert place == RankPlace(rank=1, world_size=2, mesh={"dp": 2}, coordinate={"dp": 1})
    with pytest.raises(TypeError):
        place.mesh["dp"] = 4
