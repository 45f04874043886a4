"""ZeRO over real ranks: the numbers of one device, and state that any other form of the same training takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("zero_world.py"))


@pytest.fixture(scope="module")
def trained() -> list[dict]:
    """What four ranks say of each number of data-parallel ranks and stage, each rank for itself."""
    return launch(f"{WORLD}:check", 4, deadline_seconds=240)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> list[dict]:
    """What four ranks say of checkpoints, each rank for itself."""
    return launch(f"{WORLD}:resume", 4, deadline_seconds=240, folder=str(tmp_path_factory.mktemp("zero")))


@pytest.mark.distributed
def test_exact_mode_gives_the_bits_of_one_device_for_every_number_of_ranks_and_stage(trained):
    assert all(len(rank["exact"]) == 9 and all(rank["exact"].values()) for rank in trained)


@pytest.mark.distributed
def test_fast_mode_gives_the_numbers_of_one_device(trained):
    assert all(len(rank["fast"]) == 9 and max(rank["fast"].values()) < 1e-6 for rank in trained)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["zero to plain", "plain to zero", "masters", "tensor parallel", "state dict"])
def test_state_resumes_elsewhere_to_the_bit(resumed, what):
    assert all(rank[what] and all(rank[what].values()) for rank in resumed), resumed[0][what]


@pytest.mark.distributed
def test_another_number_of_ranks_goes_on_as_one_device_does(resumed):
    assert all(rank["other ranks"] for rank in resumed)


@pytest.mark.distributed
def test_another_kind_of_optimizer_and_other_groups_are_refused_before_anything_is_touched(resumed):
    for rank in resumed:
        said = rank["refused"]
        assert said["untouched"]
        assert "the target's SGD has momentum, dampening, the snapshot has not" in said["adam into sgd"]
        assert "the target's AdamW has betas, eps, the snapshot has not" in said["sgd into adam"]
        assert "the target has in one group what the snapshot has in groups 0" in said["one group for two"]
