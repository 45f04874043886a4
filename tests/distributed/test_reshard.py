"""Layouts of every kind between real worlds of different sizes: new processes, other seeds."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, list[dict]]:
    """What four ranks saved, and what each of them returned."""
    folder = str(tmp_path_factory.mktemp("reshard"))
    return folder, launch("case_world.py:save", 4, deadline_seconds=240, folder=folder)


@pytest.mark.parametrize(("world_size", "every"), [(1, 1), (3, 1), (8, 4)])
def test_another_world_loads_what_every_layout_saved_to_the_bit(saved, world_size, every):
    folder, ranks = saved
    assert ranks[0]["steps"] > 50
    loads = launch("case_world.py:load", world_size, deadline_seconds=240, folder=folder, every=every)
    assert len(set(loads)) == 1
    assert loads[0] >= ranks[0]["steps"] // every - 7


def test_each_rank_goes_on_with_its_own_random_stream(saved):
    """C132: the state of one rank is not that of all."""
    folder, ranks = saved
    continued = [rank["continued"] for rank in ranks]
    assert len({tuple(draws) for draws in continued}) == 4
    assert launch("case_world.py:resume", 4, deadline_seconds=120, folder=folder) == continued


def test_copies_that_differ_are_refused_here(saved):
    """C011, this side of the pair."""
    _, ranks = saved
    for rank in ranks:
        assert "weight" in rank["differing"]["here"]
        assert "rank 0" in rank["differing"]["here"]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="what torch itself does was seen with 2.13")
def test_copies_that_differ_are_one_ranks_in_torch(saved):
    """C011, the other side: the same values on all ranks, which were those of one, without a word."""
    _, ranks = saved
    found = {tuple(rank["differing"]["torch"]) for rank in ranks}
    assert len(found) == 1
    assert found <= {(2.0 * r, 2.0 * r + 1) for r in range(4)}
