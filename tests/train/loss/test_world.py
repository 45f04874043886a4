"""Real ranks over gloo: one loss in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("world.py"))


@pytest.mark.distributed
def test_every_layout_has_the_loss_of_one_device():
    results = launch(f"{WORLD}:check", 4, deadline_seconds=90)
    for done in results:
        assert len(done) == 9
        assert all(done.values()), done
