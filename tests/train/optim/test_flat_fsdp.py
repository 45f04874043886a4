from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict]:
    """What four ranks say, each for itself."""
    file = Path(__file__).with_name("flat_world.py")
    return launch(f"{file}:check", 4, deadline_seconds=240, folder=str(tmp_path_factory.mktemp("flat")))


@pytest.mark.distributed
def test_exact_mode_gives_the_bits_of_one_device_recomputed_or_not(world):
    assert all(len(rank["exact"]) == 3 and all(rank["exact"].values()) and rank["recomputed"] for rank in world)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["fast", "let go of", "checkpoints"])
def test_blocks_are_whole_only_while_they_compute_and_save_for_any_other_form(world, what):
    assert all(rank[what] and all(rank[what].values()) for rank in world), world[0][what]
