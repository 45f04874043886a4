from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc


@pytest.fixture
def runs(tmp_path):
    """Make a store with six steps of one run, of which one is tagged."""
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        for step in (10, 20, 30, 40, 50, 60):
            checkpointer.save(step, {"w": torch.full((4,), step)})
        store.tag("run", 20, "best")
    return tmp_path / "s"


def steps(command, url):
    return [snapshot["step"] for snapshot in command("ls", url, "run", "--json").json["snapshots"]]


def test_what_the_rule_keeps_stays(command, runs):
    result = command("prune", runs, "run", "--keep-last", "2", "--keep-every", "30")
    assert result.code == 0
    assert steps(command, runs) == [20, 30, 50, 60]
    lines = {line.split()[0]: line for line in result.lines[1:-1]}
    assert "deleted" in lines["10"]
    assert "tagged best" in lines["20"]
    assert "every" in lines["30"]
    assert "newest, last" in lines["60"]
    assert result.lines[-1] == "run: 4 snapshots stay, 2 are deleted; their data go with gc"


def test_a_dry_run_deletes_nothing(command, runs):
    result = command("prune", runs, "run", "--keep-last", "1", "--keep-step", "40", "--dry-run", "--json")
    assert steps(command, runs) == [10, 20, 30, 40, 50, 60]
    assert result.json["dry_run"] is True
    plan = result.json["runs"][0]
    assert plan["would_delete"] == [10, 30, 50]
    assert plan["deleted"] == []
    assert plan["kept"] == [
        {"step": 20, "reasons": ["tagged best"]},
        {"step": 40, "reasons": ["asked for"]},
        {"step": 60, "reasons": ["newest", "last"]},
    ]
    assert "would go" in command("prune", runs, "run", "--keep-last", "1", "--dry-run").out


def test_all_or_nothing(command, runs):
    result = command("prune", runs, "run", "nope", "--keep-last", "1")
    assert (result.code, result.out) == (10, "")
    assert "nope" in result.err
    assert len(steps(command, runs)) == 6


@pytest.mark.parametrize(
    "options", [[], ["--keep-last", "0"], ["--keep-last", "x"], ["--keep-last", "1", "--keep-every", "-2"]]
)
def test_bad_rules(command, runs, options):
    assert command("prune", runs, "run", *options).code == 2
    assert len(steps(command, runs)) == 6
