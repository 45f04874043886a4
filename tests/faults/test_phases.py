"""One of three ranks sleeps for ever, dies, or raises, in each phase: the others are told, and the next save works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.phase_world import DEADLINE_SECONDS, MODES, PHASES, WORLD

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    script = Path(__file__).with_name("phase_world.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder), "6"],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done.stderr


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", MODES)
def test_all_others_raise_in_time_and_name_it_and_the_next_save_works(worlds, mode, phase):
    folder, log = worlds
    victim = PHASES[phase]
    told = {}
    for rank in range(WORLD):
        file = folder / f"{mode} {phase}" / f"rank-{rank}.json"
        if rank == victim and mode != "raises":
            assert not file.exists()
            continue
        assert file.exists(), f"rank {rank} was not told:\n{log[-3000:]}"
        told[rank] = json.loads(file.read_text())
    for rank, found in told.items():
        if rank == victim:
            assert "it was told to raise" in found["told"]
        else:
            assert f"rank {victim}" in found["told"], found
        # Two waits may follow one another, each with a deadline of its own.
        assert found["seconds"] < 2 * DEADLINE_SECONDS + 10
        assert found["again"] == 3
