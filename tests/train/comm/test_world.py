"""Real ranks over gloo: gathers, sums, the emulator against the library, and a rank that does not come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("world.py"))


@pytest.mark.distributed
def test_collectives_and_their_emulation_over_one_to_five_ranks():
    results = launch(f"{WORLD}:check", 5, deadline_seconds=120)
    for rank, done in enumerate(results):
        assert len(done) == 5 * (5 - rank)
        assert all(done.values())


@pytest.mark.distributed
def test_a_deadline_names_the_phase_and_who_did_not_come():
    *first, last = launch(f"{WORLD}:late", 3, deadline_seconds=60)
    assert last == []
    for rank, (message, phase, late, where) in enumerate(first):
        assert phase == "second"
        assert late == [2]
        assert where == ["did not come; it was last seen in 'first'"]
        assert f"'second' over ranks [0, 1, 2] failed on rank {rank} within 0.5 s: rank 2 did not come" in message
