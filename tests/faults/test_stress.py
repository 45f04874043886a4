"""Savers, loaders, pruning and two collectors at once on one store: nothing live is lost, and nobody sees an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120
GRACE_SECONDS = 20
"""More than twice as long as any save here takes, on a loaded machine too."""


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_two_minutes_of_everything_at_once(tmp_path):
    script = Path(__file__).with_name("stress_world.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "store"), str(SECONDS), str(GRACE_SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [outcome["problem"] for outcome in outcomes if "problem" in outcome] == []
    total = {key: sum(o.get(key, 0) for o in outcomes) for key in ("saves", "loads", "pruned", "collections", "left")}
    assert total["saves"] > 40, total
    assert total["loads"] > 20, total
    assert total["pruned"] > 20, total
    assert total["collections"] > 5, total
    assert total["left"] >= 4 * 3, total
