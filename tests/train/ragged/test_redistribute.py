"""Ragged shards over real ranks: redistribution, backward, operations, training and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict]:
    """What four ranks say, each for itself."""
    file = Path(__file__).with_name("world.py")
    return launch(f"{file}:check", 4, deadline_seconds=240, folder=str(tmp_path_factory.mktemp("ragged")))


@pytest.mark.parametrize(
    ("what", "cases"),
    [
        ("one axis", 110),
        ("sums", 10),
        ("tensor parallel", 64),
        ("operations", 8),
        ("checkpoints", 26),
        ("refused", 6),
    ],
)
def test_every_case_holds_on_every_rank(world, what, cases):
    for rank in world:
        wrong = {case: result for case, result in rank[what].items() if result is not True}
        assert not wrong
        assert len(rank[what]) >= cases


def test_a_gather_in_forward_is_a_reduce_scatter_in_backward(world):
    assert all(rank["backward"] for rank in world)


def test_adamw_on_ragged_parameters_has_the_bits_of_whole_ones(world):
    assert all(rank["training"] for rank in world)
