from __future__ import annotations

import dataclasses

import pytest

from vescale_ckpt.state.per_rank import PerRank


def test_it_holds_a_value_and_stays_as_it_is():
    value = PerRank([1, 2])
    assert value.value == [1, 2]
    assert value == PerRank([1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.value = 3
