"""Real ranks over gloo: stages that are sharded inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.train.pipe.sharded_world import KINDS, REFUSED

WORLD = str(Path(__file__).with_name("sharded_world.py"))
pytestmark = pytest.mark.distributed


def test_every_schedule_with_every_sharding_is_right_or_refused_before_the_first_step():
    results = launch(f"{WORLD}:check", 4, deadline_seconds=150)
    for pairs, tensors in results:
        assert len(pairs) == 3 * len(KINDS)
        assert {pair for pair, told in pairs.items() if told == "refused"} == {f"{a} {b}" for a, b in REFUSED}
        assert tensors >= 0
    assert sum(tensors for _, tensors in results) >= 10 * len(KINDS)
