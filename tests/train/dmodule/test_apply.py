"""Unchanged models under plans, in real worlds, against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("world.py"))
FAR = 1e-6


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_unchanged_models_give_what_one_device_gives(num_ranks):
    for found in launch(f"{WORLD}:main", num_ranks, deadline_seconds=180):
        assert len(found) == (16 if num_ranks == 4 else 6)
        for case, result in found.items():
            assert result["placed"], case
            assert result["cut"], case
            assert result["loss"] <= FAR, (case, result)
            assert result["gradient"] <= FAR, (case, result)
            if case.endswith("exact"):
                assert result["bits"], case
