"""Sizes of axes against the world."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.errors import ConfigError
from vescale_train.mesh.axes import AXES, resolve_sizes


def test_named_axes_stand_outermost_first():
    assert list(resolve_sizes({"tp": 2, "dp": 3, "pp": 1}, 6).items()) == [("pp", 1), ("dp", 3), ("tp", 2)]


def test_an_axis_that_was_not_named_is_left_out_and_one_that_was_stays():
    assert resolve_sizes({"dp": None, "tp": 1}, 1) == {"tp": 1}


def test_nothing_named_on_one_rank_is_one_replica():
    assert resolve_sizes({}, 1) == {"dp": 1}


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), min_size=1), st.integers(1, 5), st.data())
def test_the_rest_fills_the_world(sizes, rest, data):
    axis = data.draw(st.sampled_from(sorted(sizes)))
    world = math.prod(size for name, size in sizes.items() if name != axis) * rest
    found = resolve_sizes({**sizes, axis: -1}, world)
    assert found == {name: rest if name == axis else sizes[name] for name in AXES if name in sizes}


@pytest.mark.parametrize(
    ("asked", "world", "said"),
    [
        ({"tensor": 2}, 2, "unknown|axes \\['tensor'\\]"),
        ({"tp": 0}, 2, "tp=0"),
        ({"tp": -2}, 2, "tp=-2"),
        ({"tp": -1, "dp": -1}, 4, "dp=-1 and tp=-1"),
        ({"tp": 3, "dp": -1}, 4, "3 ranks, which do not divide 4"),
        ({"tp": 3}, 4, "tp=3 asked for 3"),
        ({}, 4, "no axis asked for 1"),
    ],
)
def test_what_does_not_make_up_the_world_is_refused(asked, world, said):
    with pytest.raises(ConfigError, match=said):
        resolve_sizes(asked, world)
