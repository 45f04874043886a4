"""Real ranks over gloo: one world of four does all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.train.pipe.world import SCHEDULES

WORLD = str(Path(__file__).with_name("world.py"))
pytestmark = pytest.mark.distributed


def test_every_schedule_has_the_bits_of_one_process_on_two_and_four_ranks():
    """The ranks compare losses, outputs and all gradients; here is only counted that nothing was left out."""
    results = launch(f"{WORLD}:check_schedules", 4, deadline_seconds=200)
    for kind in SCHEDULES:
        for num_ranks in (2, 4):
            told = [
                done
                for label in results[0]
                if label.startswith(f"{kind} ") and label.endswith(f"on {num_ranks}")
                for done in [sum(result[label] for result in results)]
            ]
            assert len(told) >= 2
            assert all(told)


def test_an_engine_does_what_a_training_script_needs():
    results = launch(f"{WORLD}:check_engine", 4, deadline_seconds=200)
    assert len(results[0]) == 10
    assert all(result == results[0] for result in results)
