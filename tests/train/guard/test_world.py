"""Real ranks over gloo: each fault is wrong on torch alone, and refused or right under the guard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("world.py"))


@pytest.mark.distributed
def test_each_fault_is_wrong_on_torch_and_refused_or_right_here():
    for done in launch(f"{WORLD}:check", 4, deadline_seconds=90):
        assert {name.split("_")[0] for name in done} == {"s1", "s2", "s3", "s10", "s11", "s12", "s13"}
