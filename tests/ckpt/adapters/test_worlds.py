"""Real processes over gloo: what is captured on one layout is restored on another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = Path(__file__).with_name("world.py")
DEADLINE_SECONDS = 240


def run(world_size, *scenarios):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORLD), str(rank), str(world_size), str(port), *scenarios],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in enumerate(outputs):
        assert ranks[rank].returncode == 0, f"rank {rank}:\n{output[-6000:]}"
        assert [line for line in output.splitlines() if line.startswith("passed")] == [f"passed {s}" for s in scenarios]


@pytest.mark.distributed
def test_two_ranks():
    run(2, "net", "pipeline", "partial", "frozen", "adapters")


@pytest.mark.distributed
def test_four_ranks():
    run(4, "net", "split", "ties", "submesh")
