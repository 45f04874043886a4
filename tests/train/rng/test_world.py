"""Real ranks over gloo: one device's numbers on 1 to 4 ranks, where torch draws the same slice four times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("world.py"))


@pytest.mark.distributed
def test_every_layout_has_the_numbers_of_one_device():
    results = launch(f"{WORLD}:check", 4, deadline_seconds=180)
    for done in results:
        assert done.pop("stock") == 4  # torch alone draws four equal slices
        assert set(done) == {"operations", "models", "dropout", "batches", "refusals"}
        assert all(done.values())
