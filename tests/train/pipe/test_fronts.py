"""Stages by trace and by hand do what one process does, under the model's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("front_world.py"))


@pytest.mark.distributed
def test_stages_by_trace_and_by_hand_have_the_gradients_of_one_process():
    first, second = launch(f"{WORLD}:check", 2, deadline_seconds=120)
    assert set(first) == {"chain", "skips", "tied", "gpt2", "llama", "by hand"}
    assert all(first[name] and second[name] for name in first)
