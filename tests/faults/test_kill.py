"""A rank killed at a random moment of a save, again and again: the newest snapshot is the old or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 50


def _kill(url: str, options: dict, longest_seconds: float) -> list[dict]:
    script = Path(__file__).with_name("kill_world.py")
    arguments = [url, json.dumps(options), str(KILLS), "20260101", str(longest_seconds)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(trials: list[dict]) -> None:
    assert len(trials) == KILLS
    assert [trial for trial in trials if trial["problem"]] == []
    committed = [int(trial["found"]) for trial in trials]
    assert committed == sorted(committed)
    assert committed[-1] >= KILLS // 4, "too few saves were committed for the kills to have hit any"
    assert any(trial["saves"] == 0 for trial in trials), "no kill hit the first save of a world"


@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_killed_saves_on_local_disk_leave_whole_snapshots(tmp_path):
    _check(_kill(str(tmp_path / "store"), {}, 0.3))


@pytest.mark.distributed
@pytest.mark.s3
@pytest.mark.timeout(1200)
def test_killed_saves_on_s3_leave_whole_snapshots(s3_url):
    _check(_kill(s3_url.url, s3_url.storage_options, 0.8))
